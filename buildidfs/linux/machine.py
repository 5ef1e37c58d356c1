# SPDX-License-Identifier: Apache-2.0
"""The machine that this process runs on: its name, and its visible processes.

Both depend on namespaces: a container has a name of its own, and a PID namespace shows only the
processes in it. Sources: namespaces(7), pid_namespaces(7), uts_namespaces(7).
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import threading
from typing import Final, Literal, NamedTuple

# The first namespaces have these numbers on every system: enum init_ns_ino of linux/nsfs.h.
FIRST_USER: Final = 0xEFFFFFFD
FIRST_PID: Final = 0xEFFFFFFC
FIRST_UTS: Final = 0xEFFFFFFE

View = Literal["all", "own", "foreign"]
"""The processes that /proc shows: ``all`` of the machine; those of our ``own`` PID namespace; or
``foreign`` ones, of another PID namespace, whose numbers mean other processes in ours.
"""

_CLONE_NEWUTS: Final = 0x04000000


class _Given:
    """The names that the command line and the environment give."""

    name = ""
    node = ""


def view() -> View:
    """Return which processes /proc shows to this process."""
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return "foreign"
    except OSError:
        return "foreign"
    return "all" if _inode("/proc/self/ns/pid") == FIRST_PID else "own"


class BlindSpot(NamedTuple):
    """The processes that are not visible, and the remedy; both are clauses for a person."""

    unseen: str
    remedy: str


_OWN: Final = BlindSpot(
    "only the processes of this PID namespace are seen, not those of the host and of other"
    " containers",
    "run it on the host, or in a container with the host's PID namespace (--pid=host, hostPID:"
    " true in a pod)",
)
_FOREIGN: Final = BlindSpot(
    "/proc shows the processes of another PID namespace, under numbers that mean others here",
    "mount -t proc proc /proc in this mount namespace (unshare --mount-proc does)",
)


def blind_spot() -> BlindSpot | None:
    """The processes that are out of sight; None if all can be seen."""
    return {"all": None, "own": _OWN, "foreign": _FOREIGN}[view()]


def reason_and_remedy(sentence: str) -> tuple[str, str]:
    """Split a sentence that was made from a `BlindSpot` into reason and remedy; any other sentence
    has no remedy.
    """
    for spot in (_OWN, _FOREIGN):
        if sentence == f"{spot.unseen}: {spot.remedy}":
            return spot.unseen, spot.remedy
    return sentence, ""


def call(name: str, node: str = "") -> None:
    """Set the name that this process uses for the machine; an empty name means the detected one.

    ``node`` is an orchestrator's name for the machine (``NODE_NAME`` in a pod). It is used inside a
    container only, where the host's own name is not visible.
    """
    _Given.name, _Given.node = name, node
    host_name.cache_clear()


@functools.cache
def host_name() -> str:
    """Return the name of this machine; inside a container that of the host, if it can be found out.

    The order is: the name given to `call`, the ``node`` given there, the name in the first UTS
    namespace, the name in our own. The result stays the same for the life of the process.
    """
    if _Given.name:
        return _Given.name
    own = os.uname().nodename
    if _inode("/proc/self/ns/uts") == FIRST_UTS and not is_contained():
        return own
    return _Given.node or _first_name() or own


def first_processes() -> tuple[int, ...]:
    """Return the processes that show properties of the host, the best first: init, then kthreadd,
    which may be accessible if init is not. In a PID namespace other than the first, only its own
    init.
    """
    return (1, 2) if view() == "all" else (1,)


def is_first_user() -> bool:
    """Return True if this process is in the first user namespace, where capabilities count."""
    return _inode("/proc/self/ns/user") in (0, FIRST_USER)


def is_contained() -> bool:
    """Return True if this process has a PID or mount namespace other than the host's.

    Some services of the host have a mount namespace of their own, too.
    """
    own = _inode("/proc/self/ns/mnt")
    if view() != "all":
        return True
    others = (_inode(f"/proc/{pid}/ns/mnt") for pid in first_processes())
    return next((other != own for other in others if other), False)


def _first_name() -> str:
    """Return the name in the first UTS namespace; empty if it may not be entered."""
    for pid in first_processes():
        with contextlib.suppress(OSError):
            fd = os.open(f"/proc/{pid}/ns/uts", os.O_RDONLY | os.O_CLOEXEC)
            try:
                if os.fstat(fd).st_ino == FIRST_UTS:
                    return _name_in(fd)
            finally:
                os.close(fd)
    return ""


def _name_in(uts_fd: int) -> str:
    """Return the name of the machine in a UTS namespace; empty without CAP_SYS_ADMIN."""
    # imports ctypes, which takes a tenth of the time of a short command
    from buildidfs.linux import syscalls

    found: list[str] = []

    def look() -> None:
        # Only this thread enters the namespace, and ends there.
        if syscalls.libc.setns(uts_fd, _CLONE_NEWUTS) == 0:
            found.append(os.uname().nodename)

    thread = threading.Thread(target=look, name="buildidfs-uts")
    thread.start()
    thread.join()
    return found[0] if found else ""


def _inode(path: str) -> int:
    try:
        return os.stat(path).st_ino
    except OSError:
        return 0


def perf_record() -> str:
    """Return the words that record a profile with build IDs on this kernel.

    Before Linux 5.12 the kernel puts none into its records, and perf refuses ``--buildid-mmap``.
    """
    found = re.match(r"(\d+)\.(\d+)", os.uname().release)
    if found is not None and (int(found[1]), int(found[2])) < (5, 12):
        return "perf record"
    return "perf record --buildid-mmap"
