#!/usr/bin/env bash
# Installs the official OpenAI clients for Python and Node.js into .cache/clients, for the tests that run them against the
# gateway. Does nothing if they are there.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON_VERSION=3.57.0
NODE_VERSION=7.59.0
DIR=.cache/clients
STAMP="python-$PYTHON_VERSION node-$NODE_VERSION"

[ "$(cat "$DIR/stamp" 2>/dev/null)" = "$STAMP" ] && exit 0

for tool in python3 npm; do
    command -v "$tool" >/dev/null 2>&1 || {
        echo "clients: error: $tool is not installed" >&2
        exit 1
    }
done
echo "clients: installing openai $PYTHON_VERSION (Python) and $NODE_VERSION (Node.js)" >&2
rm -rf "$DIR"
mkdir -p "$DIR/node"
# --target needs no venv module, which some distributions package apart.
python3 -m pip install --quiet --disable-pip-version-check --no-warn-script-location --no-warn-conflicts --root-user-action=ignore --target "$DIR/python" "openai==$PYTHON_VERSION"
npm install --loglevel error --no-audit --no-fund --prefix "$DIR/node" "openai@$NODE_VERSION"
echo "$STAMP" >"$DIR/stamp"
