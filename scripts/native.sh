#!/usr/bin/env bash
# Builds the native library (native/, Rust) into native/lib/libtokenizers.a, where the cgo directives of the Go packages
# look for it. The name is the one that the Go module daulet/tokenizers links.
#
# A library built once from the same inputs, by any clone on this machine, is taken from the user's cache folder
# (${XDG_CACHE_HOME:-$HOME/.cache}/prefixgate/native). Calling it again without a change costs a fraction of a second.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'native: %s\n' "$*" >&2; }
fail() {
    printf 'native: error: %s\n' "$*" >&2
    exit 1
}
need() {
    command -v "$1" >/dev/null 2>&1 || fail "$1 is not installed: $2"
}
need go 'install Go 1.26 or newer (https://go.dev/dl)'
need cargo 'install Rust 1.88 or newer (https://rustup.rs)'
need rustc 'install Rust 1.88 or newer (https://rustup.rs)'
command -v "${CC:-cc}" >/dev/null 2>&1 || fail "${CC:-cc} is not installed: install a C compiler (gcc or clang)"

MODULE=github.com/daulet/tokenizers
source=$(go list -m -f '{{.Dir}}' "$MODULE")
if [ -z "$source" ]; then
    go mod download "$MODULE"
    source=$(go list -m -f '{{.Dir}}' "$MODULE")
fi
[ -f "$source/src/lib.rs" ] || fail "the Go module $MODULE has no src/lib.rs in '$source': run go mod download"

# Every input of the build, in a fixed order.
key=$(
    {
        rustc -vV
        go list -m "$MODULE"
        printf '%s\n' "${RUSTFLAGS:-}" "${CFLAGS:-}"
        sha256sum <"$source/src/lib.rs"
        { printf '%s\n' native/Cargo.toml native/Cargo.lock native/build.rs scripts/native.sh; find native/src -type f; } |
            LC_ALL=C sort | xargs sha256sum
    } | sha256sum | cut -c1-32
)

# Go does not see that a linked library changed. A header in each package that uses it makes Go build and link again: what it
# defines ends up in the package, since Go does not link anew where a package was compiled to the same as before.
stamp() {
    local dir line="static const char prefixgate_native_key[] __attribute__((used)) = \"$key\";"
    for dir in internal/tokenize internal/tokenize/render; do
        [ -d "$dir" ] || continue
        if [ "$(cat "$dir/native_stamp.h" 2>/dev/null)" != "$line" ]; then
            printf '%s\n' "$line" >"$dir/native_stamp.h"
        fi
    done
}

lib=native/lib
mkdir -p "$lib"
if [ -f "$lib/libtokenizers.a" ] && [ "$(cat "$lib/.key" 2>/dev/null)" = "$key" ]; then
    stamp
    exit 0
fi

# install FILE: puts the library in place in one step, so that no link ever reads half of it.
install_library() {
    cp "$1" "$lib/.new.$$"
    mv "$lib/.new.$$" "$lib/libtokenizers.a"
    printf '%s\n' "$key" >"$lib/.key"
    stamp
}

cache=${XDG_CACHE_HOME:-$HOME/.cache}/prefixgate/native
mkdir -p "$cache"
if [ ! -f "$cache/$key/libtokenizers.a" ]; then
    say 'building the native library (a few minutes, once for each change of its sources)'
    # The C libraries inside are built from the crates' own sources, whatever this machine has installed.
    PREFIXGATE_TOKENIZERS_SRC=$source PCRE2_SYS_STATIC=1 RUSTONIG_SYSTEM_LIBONIG=0 CARGO_TARGET_DIR=native/target \
        cargo build --release --locked --lib --manifest-path native/Cargo.toml
    new=$(mktemp -d "$cache/.new.XXXXXX")
    trap 'rm -rf "$new"' EXIT
    cp native/target/release/libprefixgate_native.a "$new/libtokenizers.a"
    # Debug information of the standard library and the C parts: half of the size, and of the time to link.
    if command -v strip >/dev/null 2>&1; then
        strip --strip-debug "$new/libtokenizers.a"
    fi
    rm -rf "${cache:?}/$key"
    mv -T "$new" "$cache/$key" 2>/dev/null || [ -f "$cache/$key/libtokenizers.a" ] || fail "cannot write to $cache"
fi
touch "$cache/$key"
install_library "$cache/$key/libtokenizers.a"
# Libraries that no build asked for in the last 30 days go.
find "$cache" -mindepth 1 -maxdepth 1 -type d -mtime +30 -exec rm -rf {} +
