# SPDX-License-Identifier: Apache-2.0
"""``README`` at the root: what is here, for whoever comes upon the mount."""

from typing import Final

TEXT: Final = b"""\
This is buildidfs: binaries and debuginfo by build ID, also of containers that are gone.

<id>/elf, <id>/debug            the executable or library, and its debuginfo
<id>/path                       where it was seen
<id>/variants/<sha256>          every file that was ever seen with this build ID
by-path/usr/bin/app/<id>        everything that was ever seen at a path
by-name/app/<id>                and under a file name
containers/<name>/root/...      the files of one container at their own paths: a sysroot
missing/<id>                    what was asked for here and is not there (for root)

Point your tools here, MNT being this directory:
  gdb      set debug-file-directory MNT/debug    (never MNT itself: see SECURITY.md)
           set sysroot MNT/containers/<name>/root
  perf     perf --buildid-dir MNT/perf report
  lldb     settings set target.debug-file-search-paths MNT/debug
  others   DEBUGINFOD_URLS=file://MNT (elfutils, drgn), or MNT/debug as debug directory

What a file is: getfattr -d -m user. <id>/elf     What is known of it: buildidfs show <id>
Nothing can be written here. More: man 7 buildidfs-mount
"""
