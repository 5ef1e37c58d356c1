#!/bin/sh
# Read a profile on a machine that has neither the binaries nor buildidfs.
#
#   perf-report-elsewhere.sh pack PERF.DATA OUT.TAR     here, where the store is mounted
#   perf-report-elsewhere.sh report OUT.TAR [OPTION...] there; options are those of perf report
#
# The archive holds the profile and, of each binary in it, what the mount has: executable, debug
# file, the vDSO, the kernel's symbols. What it has not is named. Record with --buildid-mmap.
# MOUNTPOINT is where the store is mounted, /buildid by default.
set -eu

perf=${MOUNTPOINT:-/buildid}/perf

pack() {
    data=$1 out=$2
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    list=$work/list
    perf buildid-list -H -i "$data" | while read -r id path; do
        link=.build-id/$(printf %s "$id" | cut -c1-2)/$(printf %s "$id" | cut -c3-)
        if [ -e "$perf/$link/" ]; then
            # the link, and the directory it leads to
            printf '%s\n%s\n' "$link" "$(realpath --relative-to="$perf" "$perf/$link")"
        else
            echo "not captured: $id $path" >&2
        fi
    done >"$list"
    ln -s "$(realpath "$data")" "$work/perf.data"
    tar -cf "$out" -C "$work" --dereference perf.data
    tar -rf "$out" -C "$perf" --verbatim-files-from -T "$list"
    echo "$out: the profile and $(($(wc -l <"$list") / 2)) binaries"
}

report() {
    archive=$1
    shift
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    tar -xf "$archive" -C "$work" --no-same-owner
    perf --buildid-dir "$work" report -i "$work/perf.data" "$@"
}

case ${1-}:$# in
    pack:3) pack "$2" "$3" ;;
    report:[2-9]*) shift && report "$@" ;;
    *) sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
