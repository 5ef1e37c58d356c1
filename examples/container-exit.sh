#!/bin/sh
# The idea in one script: a program runs on a filesystem that only its own mount namespace has, is
# captured, exits, its filesystem is gone with it, and its core file still has names and lines.
#
# Needs root, gcc and gdb. Uses a store and a mount of its own in a temporary directory and removes
# them; STORE and MOUNTPOINT name others. BUILDIDFS names the program if it is not on PATH.
set -eu

buildidfs=${BUILDIDFS:-buildidfs}
command -v "$buildidfs" >/dev/null || buildidfs=$(dirname "$0")/../.venv/bin/buildidfs

work=$(mktemp -d)
store=${STORE:-$work/store}
mountpoint=${MOUNTPOINT:-$work/mnt}
run() { "$buildidfs" --store "$store" "$@"; }
say() { printf '\n== %s\n' "$*"; }

container=
mounted=
cleanup() {
    [ -z "$container" ] || kill "$container" 2>/dev/null || true
    [ -z "$mounted" ] || run unmount "$mountpoint" || true
    rm -rf "$work"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

cat >"$work/godot.c" <<'C'
#include <stdio.h>
#include <unistd.h>

static int wait_for_godot(int days)
{
    while (days > 0) {
        printf("waiting\n");
        fflush(stdout);
        pause(); /* he will not come today */
    }
    return days;
}

int main(void)
{
    return wait_for_godot(2);
}
C
gcc -g -O0 -Wl,--build-id -o "$work/godot" "$work/godot.c"

say "A program on a tmpfs that nobody else can see"
mkdir "$work/app"
mkfifo "$work/said"
# exec all the way: the process that is killed below is the program.
unshare --mount --propagation private sh -c '
    mount -t tmpfs none "$1/app" && mv "$1/godot" "$1/app/" && exec "$1/app/godot"
' sh "$work" >"$work/said" &
container=$!
read -r waiting <"$work/said"
echo "process $container is $waiting, its /proc/$container/exe is $(readlink "/proc/$container/exe")"
[ -z "$(ls -A "$work/app")" ]
echo "and out here $work/app is empty"

say "Capture it, and dump its core, as its last words"
run scan proc --pid "$container"
gdb -nx -batch -p "$container" -ex "gcore $work/core" >"$work/gdb.log" 2>&1
id=$(readelf -n "/proc/$container/exe" | sed -n 's/.*Build ID: //p')
digest=$(sha256sum <"/proc/$container/exe")

say "It exits, and its filesystem with it"
kill "$container"
wait "$container" 2>/dev/null || true
container=
[ ! -e "$work/godot" ]
echo "there is no godot left, not in $work either, where it came from"

say "Mount the store: here it is, under build ID $id"
mkdir -p "$mountpoint"
if ! mountpoint -q "$mountpoint"; then
    run mount "$mountpoint"
    mounted=yes
fi
cat "$mountpoint/$id/path"
ls -l "$mountpoint/$id"
[ "$(sha256sum <"$mountpoint/$id/elf")" = "$digest" ]

say "And gdb knows what the core file is about"
gdb -nx -batch -iex "set debug-file-directory $mountpoint/debug" -c "$work/core" \
    -ex 'bt -frame-arguments all' >"$work/backtrace" 2>"$work/gdb.log" || {
    cat "$work/gdb.log" >&2
    exit 1
}
cat "$work/backtrace"
grep -q 'wait_for_godot (days=2) at .*godot.c:9' "$work/backtrace"
