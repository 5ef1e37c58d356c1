#!/bin/sh
# A backtrace of a core file from a machine that you have no access to, from the image and the
# packages that its program came from. Nothing of that is run, installed or unpacked.
#
#   crash-elsewhere.sh CORE FILE...
#
# A FILE is a package (.deb, .rpm, .apk, .pkg.tar.*) or an image (docker save, OCI layout). Packages
# with debuginfo give names and lines. Needs gdb, and root or fusermount3. Uses a store and a
# mount of its own in a temporary directory; STORE and MOUNTPOINT name others.
# BUILDIDFS names the program if it is not on PATH.
set -eu

[ $# -ge 2 ] || { sed -n '2,11s/^# \{0,1\}//p' "$0" >&2; exit 2; }
core=$1
shift

buildidfs=${BUILDIDFS:-buildidfs}
command -v "$buildidfs" >/dev/null || buildidfs=$(dirname "$0")/../.venv/bin/buildidfs

work=$(mktemp -d)
store=${STORE:-$work/store}
mountpoint=${MOUNTPOINT:-$work/mnt}
run() { "$buildidfs" --store "$store" "$@"; }

mounted=
cleanup() {
    [ -z "$mounted" ] || run unmount "$mountpoint" || true
    rm -rf "$work"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

for file; do
    case $file in
        *.deb | *.ddeb | *.udeb | *.rpm | *.apk | *.pkg.tar | *.pkg.tar.*) kind=package ;;
        *) kind=image ;;
    esac
    run scan "$kind" "$file" >&2
done

mkdir -p "$mountpoint"
if ! mountpoint -q "$mountpoint"; then
    run mount "$mountpoint"
    mounted=yes
fi
gdb -nx -batch -iex "set debug-file-directory $mountpoint/debug" -c "$core" \
    -ex 'bt -frame-arguments all' 2>"$work/gdb.log" || {
    cat "$work/gdb.log" >&2
    exit 1
}
