# SPDX-License-Identifier: Apache-2.0
"""The text of /proc/PID/cgroup (cgroups(7)) and the container that its path names.

The label is for people. It follows the conventions of the container managers, which any user who
may create cgroups can imitate. So a label is never a key, and no decision depends on it.
"""

from __future__ import annotations

import re

from buildidfs.shares import Share

_DELETED = b" (deleted)"
_ID = re.compile(rb"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")
# A UUID; for a pod that the kubelet reads from a file, the hexadecimal hash of the file.
_POD = re.compile(
    rb"pod([0-9a-f]{8})[-_]?([0-9a-f]{4})[-_]?[0-9a-f]{4}[-_]?[0-9a-f]{4}[-_]?[0-9a-f]{12}"
)
# Prefixes of the container's ID in its component of the path: docker-ID.scope. A runtime that was
# given a name for systemd and did not use it has parent.slice:cri-containerd:ID.
_PREFIXES = {
    b"docker": "docker",
    b"libpod": "podman",
    b"libpod-payload": "podman",
    b"libpod_pod": "podman",
    b"machine-libpod_pod": "podman",
    b"user-libpod_pod": "podman",
    b"crio": "crio",
    b"cri-containerd": "containerd",
    b"nerdctl": "containerd",
}
# If there is no prefix, the component before: /docker/ID, and namespaces of containerd.
_PARENTS = {
    b"docker": "docker",
    b"moby": "docker",
    b"default": "containerd",
    b"k8s.io": "containerd",
}
# The task and a number, on machines of Amazon's container service.
_FARGATE = re.compile(rb"/ecs/(?:[^/]+/)*([0-9a-f]{12})[0-9a-f]{20}(-\d+)(?![^/])")
_NAMED = (
    ("containerd", re.compile(rb"\A/default/([^/]+)")),
    ("lxc", re.compile(rb"/machine-lxc\\x2d\d+\\x2d([^/]+)\.scope")),
    ("nspawn", re.compile(rb"/systemd-nspawn@([^/]+)\.service(?!/supervisor)")),
    ("nspawn", re.compile(rb"/machine-(?!qemu)([^/]+)\.scope(?!/supervisor)")),
    ("lxc", re.compile(rb"/lxc\.payload[./]([^/]+)")),
    ("lxc", re.compile(rb"/lxc/([^/]+)")),
)
_USER = re.compile(rb"/user\.slice/user-(\d{1,10})\.slice(?![^/])")
_PODMAN_POD = b"libpod_pod_"
_UNIFIED = re.compile(rb"^0::(.*)$", re.MULTILINE)
_UNIT_ESCAPE = re.compile(rb"\\x([0-9a-f]{2})")
_UNPRINTABLE = re.compile(r"[^\w.:@+-]", re.ASCII)

# A path has at most PATH_MAX bytes, and the kernel has sixteen hierarchies. A longer text does not
# come from the kernel, and would take quadratic time.
_PATH_MAX = 4096
_TEXT_MAX = 16 * _PATH_MAX


def path(text: bytes) -> bytes:
    """Return the most informative path, from the unified hierarchy or from one of version 1.

    A line that names a container is preferred (if both versions are in use, version 2 may know only
    the container manager), then the unified one, then systemd's own, then the longest. The result
    is empty if the text has no path.
    """
    best: tuple[bool, bool, bool, int] | None = None
    chosen = b""
    for line in text[:_TEXT_MAX].split(b"\n"):
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


def unified(text: bytes) -> bytes:
    """Return the path in the unified hierarchy (version 2); empty if there is none."""
    found = _UNIFIED.search(text[:_TEXT_MAX])
    return found[1].removesuffix(_DELETED) if found else b""


def container_label(cgroup_path: bytes) -> str | None:
    """Return a short name such as ``docker:0123456789ab`` or ``nspawn:NAME``; None for no
    container.

    The innermost container counts. The processes that supervise a container (conmon, the supervisor
    of systemd-nspawn) also have its name in their path, but do not belong to it.
    """
    cgroup_path = cgroup_path[:_PATH_MAX]
    pod = _POD.search(cgroup_path)
    kubernetes = pod is not None or b"kubepods" in cgroup_path
    for found in reversed(_containers(cgroup_path)):
        above, _, prefix = cgroup_path[: found.start()].rpartition(b"/")
        short = found[0][:12].decode()
        if kubernetes:
            return f"k8s:{short}"
        if b"/ecs/" in cgroup_path or b"/ecstasks.slice/" in cgroup_path:
            return f"ecs:{short}"
        token = prefix.rstrip(b"-_:").rpartition(b":")[2]
        runtime = _PREFIXES.get(token) if token else _PARENTS.get(above.rpartition(b"/")[2])
        return f"{runtime or 'container'}:{short}"
    if pod is not None:
        return f"k8s:{(pod[1] + pod[2]).decode()}"
    if task := _FARGATE.search(cgroup_path):
        return f"ecs:{(task[1] + task[2]).decode()}"
    for runtime, pattern in _NAMED:
        if named := pattern.search(cgroup_path):
            return f"{runtime}:{_unit_name(named[1])}"
    return None


def container_id(cgroup_path: bytes) -> str:
    """Return the ID of the innermost container, 64 hex digits; empty if the path has none."""
    found = _innermost(cgroup_path)
    return found[0].decode() if found else ""


def place(cgroup_path: bytes) -> bytes:
    """Return the part of a path that tells a container from an imitation elsewhere in the tree.

    The part ends with the ID of the container. If the path has no ID, the part is the control group
    of its user, or else the root. The result is empty if the path is.
    """
    if found := _innermost(cgroup_path):
        return cgroup_path[: found.end()]
    user = _USER.match(cgroup_path)
    return user[0] if user else cgroup_path[:1]


def outermost(cgroup_path: bytes) -> bytes:
    """Return the path of the outermost container; empty if there is none.

    A container can make control groups below its own, with any names, but has only one outermost.
    """
    return cgroup_path[: _first_end(cgroup_path[:_PATH_MAX], _containers(cgroup_path))]


def label_of_maker(label: str, path: bytes, maker: int) -> str:
    """Return a label for reports, which tells the container of root from that of another user, or
    of another container, with the same label. ``maker`` is the user who made the control group, 0
    for root.
    """
    if not label or container_label(path) != label:
        return label
    if maker:
        return f"{label} (user {maker})"
    outer = outer_label(path)
    return f"{label} in {outer}" if outer else label


def label_for_reports(label: str, path: bytes, owner: int) -> str:
    """Return `label_of_maker` of a recorded sighting, whose ``owner`` is 0 for root."""
    return label_of_maker(label, path, owner or user_id(path) or 0)


def outer_label(cgroup_path: bytes) -> str | None:
    """Return the label of the outermost container of a path; None if there is only one.

    A pod of Podman is no container here: all containers of the pod would be reported as inside it.
    """
    cgroup_path = cgroup_path[:_PATH_MAX]
    containers = [
        each
        for each in _containers(cgroup_path)
        if not cgroup_path[: each.start()].endswith(_PODMAN_POD)
    ]
    part = cgroup_path[: _first_end(cgroup_path, containers)]
    label = container_label(part) if part != place(cgroup_path) else None
    return label if label != container_label(cgroup_path) else None


def share(cgroup_path: bytes, mnt: int, owner: int) -> Share:
    """Return the share of a container or of another foreign mount namespace, see `Share`.

    ``owner`` is the user who made it, see `builder.owner`. If the path has no container, the
    place is the mount namespace ``mnt``.
    """
    outer = outermost(cgroup_path)
    inner = place(cgroup_path) if _innermost(cgroup_path) else outer
    where = inner.decode("utf-8", "surrogateescape") or f"mnt:{mnt}"
    maker = f"uid {owner}" if owner else outer.decode("utf-8", "surrogateescape")
    return Share(maker or where, where)


def user_id(cgroup_path: bytes) -> int | None:
    """Return the user to whom systemd has given this part of the tree; None if there is none."""
    user = _USER.match(cgroup_path)
    return int(user[1]) if user else None


def _innermost(cgroup_path: bytes) -> re.Match[bytes] | None:
    return next(iter(_containers(cgroup_path)[::-1]), None)


def _first_end(cgroup_path: bytes, containers: list[re.Match[bytes]]) -> int:
    """Return the offset of the end of the first container in the path; 0 if there is none."""
    named = (pattern.search(cgroup_path) for _, pattern in _NAMED)
    return min((each.end() for each in (*named, *containers) if each), default=0)


def _containers(cgroup_path: bytes) -> list[re.Match[bytes]]:
    """Return the IDs of containers in a path, the outermost first."""
    return [
        found
        for found in _ID.finditer(cgroup_path[:_PATH_MAX])
        if not cgroup_path[: found.start()].endswith(b"conmon-")
    ]


def _unit_name(escaped: bytes) -> str:
    """Return the instance of a systemd unit name, unescaped, in printable characters."""
    raw = _UNIT_ESCAPE.sub(lambda found: bytes([int(found[1], 16)]), escaped)
    return _UNPRINTABLE.sub("?", raw.decode("utf-8", "replace"))
