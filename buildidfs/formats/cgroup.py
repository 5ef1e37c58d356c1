# SPDX-License-Identifier: Apache-2.0
"""The text of /proc/PID/cgroup (cgroups(7)) and what its path says about the container.

The label is for people. It follows the conventions of the container managers, which anybody who
may create cgroups can imitate: it is never a key and decides nothing.
"""

from __future__ import annotations

import re

_DELETED = b" (deleted)"
_ID = rb"([0-9a-f]{64})"
# A monitor process (conmon) sits in a scope named after the container, on the host.
_MONITOR = re.compile(rb"conmon-[0-9a-f]{64}|/lxc\.monitor")
_RUNTIMES = (
    ("k8s", re.compile(rb"kubepods.*[/-]" + _ID)),
    ("docker", re.compile(rb"/docker[-/]" + _ID)),
    ("podman", re.compile(rb"/libpod-" + _ID)),
    ("crio", re.compile(rb"/crio-" + _ID)),
    ("containerd", re.compile(rb"/(?:cri-containerd|nerdctl)-" + _ID)),
    ("containerd", re.compile(rb"^/default/" + _ID)),
    ("ecs", re.compile(rb"/ecs/.*/" + _ID)),
    ("container", re.compile(_ID)),
)
_POD = re.compile(rb"kubepods.*pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f_-]+)")
_NAMED = (
    ("nspawn", re.compile(rb"/systemd-nspawn@([^/]+)\.service")),
    ("nspawn", re.compile(rb"/machine\.slice/machine-([^/]+)\.scope")),
    ("lxc", re.compile(rb"/lxc\.payload[./]([^/]+)")),
    ("lxc", re.compile(rb"/lxc/([^/]+)")),
)
_UNIT_ESCAPE = re.compile(rb"\\x([0-9a-f]{2})")
_UNPRINTABLE = re.compile(r"[^\w.:@+-]")


def path(text: bytes) -> bytes:
    """The path that tells most about a process: the unified hierarchy's, or one of version 1.

    A line that names a container comes first (with both versions in use, version 2 may know only
    the container manager), then the unified one, then systemd's own, then the longest. Empty when
    there is none.
    """
    best: tuple[bool, bool, bool, int] | None = None
    chosen = b""
    for line in text.split(b"\n"):
        hierarchy, _, rest = line.partition(b":")
        controllers, colon, where = rest.partition(b":")
        if not colon:
            continue
        where = where.removesuffix(_DELETED)
        rank = (
            container_label(where) is not None,
            hierarchy == b"0" and not controllers,
            controllers == b"name=systemd",
            len(where),
        )
        if best is None or rank > best:
            best, chosen = rank, where
    return chosen


def container_label(cgroup_path: bytes) -> str | None:
    """A short name such as ``docker:0123456789ab`` or ``nspawn:NAME``; None for no container."""
    if _MONITOR.search(cgroup_path):
        return None
    for runtime, pattern in _RUNTIMES:
        if found := pattern.findall(cgroup_path):
            return f"{runtime}:{found[-1][:12].decode()}"
    if pod := _POD.search(cgroup_path):
        return f"k8s:{pod[1][:8].decode()}"
    for runtime, pattern in _NAMED:
        if named := pattern.search(cgroup_path):
            return f"{runtime}:{_unit_name(named[1])}"
    return None


def _unit_name(escaped: bytes) -> str:
    """A systemd unit name's instance, unescaped, fit to be shown on a terminal."""
    raw = _UNIT_ESCAPE.sub(lambda found: bytes([int(found[1], 16)]), escaped)
    return _UNPRINTABLE.sub("?", raw.decode("utf-8", "replace"))
