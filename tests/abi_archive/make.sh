#!/usr/bin/env bash
# Archives today's mock family and mock backend as plugins of the current ABI minor. Run once when a minor is released, on
# each platform, and commit what it makes; an archived file is never replaced afterwards, because plugins built at that
# minor exist outside this repository and have to go on loading.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."

number() { sed -n "s/^pub const $1: u32 = \([0-9]*\);/\1/p" abi/src/version.rs; }
version="$(number ABI_MAJOR).$(number ABI_MINOR)"
host="$(rustc -vV | sed -n 's/^host: //p')"
case "$host" in
    *-linux-*) platform="${host%%-*}-linux" extension=so ;;
    *-apple-*) platform="${host%%-*}-macos" extension=dylib ;;
    *) echo "error: no plugins on $host" >&2; exit 1 ;;
esac
place="tests/abi_archive/$version/$platform"
if [[ -e "$place" && "${1:-}" != --replace-unreleased ]]; then
    echo "error: $place exists; --replace-unreleased makes it anew while ABI $version is not released" >&2
    exit 1
fi

# No path of the building machine stays in the files: panic messages name sources below these two roots.
sources="$(cargo metadata --format-version 1 | grep -o '"manifest_path":"[^"]*/abi_stable-[0-9.]*/Cargo.toml"' | sed 's|.*:"||; s|/abi_stable-[^/]*/Cargo.toml"||')"
export RUSTFLAGS="--remap-path-prefix=$sources=/deps --remap-path-prefix=$PWD=/src"
export CARGO_PROFILE_RELEASE_STRIP=symbols CARGO_PROFILE_RELEASE_LTO=fat CARGO_PROFILE_RELEASE_CODEGEN_UNITS=1
target="${ABI_ARCHIVE_TARGET_DIR:-target/abi_archive}"
for kind in family backend; do
    cargo build --quiet --release --target-dir "$target" -p "mlxcel-test-mock-$kind"
    mkdir -p "$place"
    cp "$target/release/libmlxcel_${kind}_mock.$extension" "$place/"
done
ls -l "$place"
