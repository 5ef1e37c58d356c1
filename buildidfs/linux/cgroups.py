# SPDX-License-Identifier: Apache-2.0
"""Control groups of version 2: the number that names one. Source: cgroups(7), kernfs.

Paths of control groups come again with the next container of that name. The number is what
PERF_SAMPLE_CGROUP and bpf_get_current_cgroup_id tell, too, and is not used again until the
next boot: where inode numbers have 64 bits, it is that of the directory.
"""

from __future__ import annotations

import functools
import os

from buildidfs.linux import mounts


def cgroup_id(path: bytes) -> int:
    """The number of the control group at ``path`` of the unified hierarchy, as /proc tells it.

    0 where it is not known: there is no such group (any more), it is outside of our cgroup
    namespace, or the hierarchy is not mounted where we can see it.
    """
    if not path.startswith(b"/") or b".." in path.split(b"/"):
        return 0
    place = _hierarchy()
    if place is None:
        return 0
    mount_point, device = place
    try:
        status = os.stat(mount_point + path, follow_symlinks=False)
    except (OSError, ValueError):
        return 0
    # Something else may be mounted there by now.
    return status.st_ino if status.st_dev == device else 0


@functools.cache
def _hierarchy() -> tuple[bytes, int] | None:
    """Where all of the unified hierarchy is mounted, and its device number."""
    try:
        text = mounts.mountinfo()
    except OSError:
        return None
    for line in text.splitlines():
        head, _, tail = line.partition(b" - ")
        fields = head.split(b" ")
        # With another root it is only a part, or one seen from another cgroup namespace. A name
        # with a blank in it, which would be escaped, is nobody's place for it.
        if tail.startswith(b"cgroup2 ") and fields[3] == b"/" and b"\\" not in fields[4]:
            major, _, minor = fields[2].partition(b":")
            return fields[4], os.makedev(int(major), int(minor))
    return None
