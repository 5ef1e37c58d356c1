# SPDX-License-Identifier: Apache-2.0
"""The container of a process, and its label.

The kernel has no containers, only namespaces and control groups. Only the namespaces of a process
decide if it is in a container, because a process cannot imitate them; the label is for people.
"""

from __future__ import annotations

import functools
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol

from buildidfs.errors import UsageError
from buildidfs.formats.container import cgroup
from buildidfs.linux import namespaces as its_namespaces
from buildidfs.model import NO_NAMES, ContainerNames, NamespaceSet

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

_NAMES: Final = NamespaceSet.__struct_fields__
_SHOWN: Final = 5


def apart(namespaces: NamespaceSet, initial: NamespaceSet) -> int:
    """Return `Origin.apart`: bit 1<<i is set if the i-th namespace differs from the host's.

    An unknown namespace (0) counts as the host's.
    """
    bits = 0
    for number, name in enumerate(_NAMES):
        its, hosts = getattr(namespaces, name), getattr(initial, name)
        if its != hosts and its and hosts:
            bits |= 1 << number
    return bits


def apart_names(apart: int) -> list[str]:
    """Return the names of the namespaces in ``apart``, in the order of `NamespaceSet`."""
    return [name for number, name in enumerate(_NAMES) if apart & 1 << number]


def in_container(apart: int, names: Iterable[str] = ("mnt",)) -> bool:
    """Return True if each namespace of ``names`` differs from the host's according to ``apart``."""
    return all(apart & 1 << _NAMES.index(name) for name in names)


def maker(pid_fd: int, apart: int) -> Callable[[], int] | None:
    """Return `path_access.Root.maker` for a process with the namespaces ``apart``.

    Mounts that root makes in a mount namespace of another user count as root's.
    """
    if not in_container(apart, ("mnt",)):
        return None
    if not in_container(apart, ("user",)):
        return lambda: 0
    return functools.partial(its_namespaces.user_owner, pid_fd)


def owner(pid_fd: int, user_namespace: int, cgroup_path: bytes) -> int:
    """Return the user who made the surroundings of a process; 0 for root. Raises OSError."""
    user = group_maker(cgroup_path)
    if user or cgroup.outermost(cgroup_path):
        return user
    if user_namespace in (0, its_namespaces.own_user()):
        return 0
    return its_namespaces.outermost_owner(pid_fd) or 0


def group_maker(cgroup_path: bytes) -> int:
    """Return the user who made the control group of a container; 0 for root.

    A user to whom a part of the hierarchy belongs may make groups there with the ID of any
    container. So the owner of the group above counts; if that is gone, the part that systemd gives
    to each user.
    """
    outer = cgroup.outermost(cgroup_path)
    if not outer and cgroup.container_label(cgroup_path):
        outer = cgroup_path  # of a pod or task, which has no ID of a container
    maker = its_namespaces.cgroup_owner(outer.rpartition(b"/")[0] or b"/") if outer else None
    return (cgroup.user_id(cgroup_path) or 0) if maker is None else maker


def shown(label: str, cgroup_path: bytes, owner: int | None = None) -> str:
    """Return a label for reports, which is not that of a container of root if another user, or
    another container, has only taken its name.

    ``owner`` is the user who made the container, 0 for root; None looks at the control group, as
    long as that exists.
    """
    if not label or cgroup.container_label(cgroup_path) != label:
        return label
    maker = group_maker(cgroup_path) if owner is None else owner or cgroup.user_id(cgroup_path)
    if maker:
        return f"{label} (user {maker})"
    outer = cgroup.outer_label(cgroup_path)
    return f"{label} in {outer}" if outer else label


class _Seen(Protocol):
    """An `Origin`, or a row of the journal."""

    @property
    def container(self) -> str: ...
    @property
    def cgroup(self) -> bytes: ...
    @property
    def owner(self) -> int: ...


def reported(seen: _Seen) -> str:
    """Return `shown` for the container of a sighting."""
    return shown(seen.container, seen.cgroup, seen.owner)


def label(cgroup_path: bytes, namespaces: NamespaceSet, names: Collection[str] = ("mnt",)) -> str:
    """Return the label of the container of a contained process: ``docker:0123456789ab``.

    If the control group does not name the container, the label has the inode number of a namespace,
    ``mnt:4026532177``, which is unique only as long as the container runs. It is the mount
    namespace if that is among ``names``, the namespaces that define a container; else the first of
    them.
    """
    found = cgroup.container_label(cgroup_path)
    if found is not None:
        return found
    kind = "mnt" if "mnt" in names else next(iter(names))
    return f"{kind}:{getattr(namespaces, kind)}"


def label_by(
    cgroup_path: bytes, namespaces: NamespaceSet, apart: int, names: Collection[str]
) -> str:
    """Return the label of a process's container, if ``names`` define a container; empty if the
    process is in none.
    """
    return label(cgroup_path, namespaces, names) if in_container(apart, names) else ""


def choose(
    wanted: Iterable[str],
    labels: Collection[str],
    called: Mapping[str, ContainerNames] = MappingProxyType({}),
) -> frozenset[str]:
    """Return the labels of the containers that a user has named.

    Each text may be a whole label, or a unique beginning of the part after the colon; an ID longer
    than in labels (docker's 64 digits) is also accepted. ``called`` has the names of labels; a name
    selects all containers that have it. Raises `UsageError` for a text that fits none of
    ``labels``, or for a beginning that fits several.
    """
    found: set[str] = set()
    for text in wanted:
        named = {label for label in labels if label in called and called[label].fits(text)}
        found |= named or {_choose_one(text, labels)}
    return frozenset(found)


def fits(text: str, label: str, names: ContainerNames = NO_NAMES) -> bool:
    """Return True if the user's ``text`` may name the container ``label``; see `choose`."""
    if names.fits(text):
        return True
    manager, colon, its_id = text.rpartition(":")
    if not its_id or (colon and not label.startswith(f"{manager}:")):
        return text == label
    return text == label or _same_beginning(its_id, label.partition(":")[2])


def _choose_one(text: str, labels: Collection[str]) -> str:
    if text in labels:
        return text
    fitting = sorted(label for label in labels if fits(text, label))
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise UsageError(f"several containers begin with {text!r}: {_listed(fitting)}")
    known = f"; running: {_listed(sorted(labels))}" if labels else "; none is running"
    raise UsageError(f"no container {text!r} to be seen{known}")


def _same_beginning(its_id: str, shown: str) -> bool:
    # Names must match from their beginning; only a hexadecimal ID may be cut off.
    if shown.startswith(its_id):
        return True
    return len(its_id) == 64 and len(shown) == 12 and its_id.startswith(shown)


def _listed(labels: list[str]) -> str:
    more = len(labels) - _SHOWN
    return ", ".join(labels[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
