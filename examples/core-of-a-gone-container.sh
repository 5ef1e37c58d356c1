#!/bin/sh
# gdb on a core file, with the files of a container that is gone as if it were still there: each
# library from the path it was loaded from, with whatever version the container had.
#
#   core-of-a-gone-container.sh                       which containers there are, latest last
#   core-of-a-gone-container.sh NAME EXECUTABLE CORE [GDB-OPTION...]
#
# NAME is a name in MOUNTPOINT/containers, or part of it (of the ID, say). EXECUTABLE is the path
# that it had in the container. Without options gdb prints a backtrace.
# MOUNTPOINT is where the store is mounted, /buildid by default.
set -eu

mountpoint=${MOUNTPOINT:-/buildid}
containers=$mountpoint/containers

if [ $# -eq 0 ]; then
    for directory in "$containers"/*/; do
        [ -e "$directory/last-seen" ] || continue
        printf '%s %s\n' "$(cat "$directory/last-seen")" "$(basename "$directory")"
    done | sort
    exit
fi
[ $# -ge 3 ] || { sed -n '2,12s/^# \{0,1\}//p' "$0" >&2; exit 2; }
name=$1 executable=$2 core=$3
shift 3

# A lookup finds what is not listed for everybody, so the name as it is comes first.
if [ ! -d "$containers/$name" ]; then
    found=$(ls "$containers" | grep -F -e "$name") || { echo "no container $name" >&2; exit 1; }
    [ "$(echo "$found" | wc -l)" = 1 ] || { printf 'which of them?\n%s\n' "$found" >&2; exit 1; }
    name=$found
fi
root=$containers/$name/root
[ $# -gt 0 ] || set -- -batch -ex 'bt -frame-arguments all' -ex 'info sharedlibrary'

# The sysroot is for libraries and has to be set before the core is loaded. Debug files come from
# the whole store: that of the container may have none.
exec gdb -nx -iex "set sysroot $root" -iex "set debug-file-directory $mountpoint/debug" \
    "$@" "$root/${executable#/}" "$core"
