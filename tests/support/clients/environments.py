# SPDX-License-Identifier: Apache-2.0
"""Environments that commands are run in: limits, streams, rights, namespaces, what is mounted.

A table, for tests that go through all of them.
"""

from __future__ import annotations

import errno
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tests.support.clients.commands import ROOT
from tests.support.clients.tools import Argument, tool
from tests.support.containers.usernamespaces import mapped
from tests.support.harness.forbidding import refusing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

USER = 1000

# What containers of Docker have.
_DOCKER = (
    "chown,dac_override,fsetid,fowner,mknod,net_raw,setgid,setuid,setfcap,setpcap,net_bind_service,"
    "sys_chroot,kill,audit_write"
)
_SOME = "+dac_override,+net_raw,+setuid,+sys_ptrace"
_GIB = 1 << 30


def _python() -> tuple[str, ...]:
    """The directories that this Python and the program need; one may be below another.

    A Python of a virtual environment is a chain of symbolic links to the one that made it.
    """
    directories = [sys.base_prefix, sys.prefix, str(ROOT)]
    link = Path(sys.executable)
    while link.is_symlink():
        link = link.parent / link.readlink()
        directories.append(str(link.parent))
    return tuple(dict.fromkeys(map(os.path.abspath, directories)))


_PYTHON = _python()


class Environment(NamedTuple):
    """``before`` are the words before a command, a function of a new directory, with ``env``.

    Of ``stdin`` there are several kinds; "closed" is for commands that read nothing. What makes
    ``notes`` is told with a warning on standard error. A command that is to be
    ``alone`` there has another state of its own, or of its processes, than a fork would have.
    """

    name: str
    before: Callable[[Path], Sequence[Argument]] = lambda place: ()
    env: Mapping[str, str | None] = {}
    stdin: str = "pipe"
    root_only: bool = False
    notes: str = ""
    alone: bool = False

    @property
    def is_for_one(self) -> bool:
        """True if a command must be a program that was started there, and not a fork of one."""
        return self.alone or self.stdin != "pipe"


def _words(*words: Argument) -> Callable[[Path], Sequence[Argument]]:
    return lambda place: words


def _shell(script: str) -> Callable[[Path], Sequence[Argument]]:
    """A shell that does something first; ``$D`` is the directory."""
    return lambda place: (
        *("/bin/sh", "-c"),
        f'D={shlex.quote(str(place))}; {script}; exec "$@"',
        "sh",
    )


def _limited(*limits: str) -> Callable[[Path], Sequence[Argument]]:
    return _words("prlimit", *limits)


def _bounded(capabilities: str, *more: str) -> Callable[[Path], Sequence[Argument]]:
    words = ",".join(f"+{name}" for name in capabilities.split(",")) if capabilities else ""
    return _words("setpriv", f"--bounding-set=-all{',' if words else ''}{words}", *more)


def _without(capability: str) -> Callable[[Path], Sequence[Argument]]:
    return _words("setpriv", f"--bounding-set=-{capability}")


def _mounting(script: str) -> Callable[[Path], Sequence[Argument]]:
    """A mount namespace of its own in which something is mounted first."""
    return lambda place: ("unshare", "-m", *_shell(f"set -e; {script}")(place))


def _in_cgroup(place: Path, file: str, value: int) -> Sequence[Argument]:
    """A control group with a limit; see `cgroups`."""
    directory = cgroup(file.split(".")[0])
    script = f"echo {value} > {directory}/{file}; echo $$ > {directory}/cgroup.procs"
    return _shell(script)(place)


def cgroup(controller: str) -> Path:
    """The directory of a control group of this process, which has to be made."""
    first = Path("/sys/fs/cgroup", controller)
    top = first if first.is_dir() else Path("/sys/fs/cgroup")
    return top / f"buildidfs-test-{os.getpid()}"


def _chroot(place: Path, *mounts: str) -> Sequence[Argument]:
    """A root with what programs need, and a /tmp, and some more that is mounted."""
    root = place / "root"
    shown = ["/usr", "/lib", "/lib64", "/bin", "/etc", *_PYTHON, str(place.parent)]
    script = ['mkdir -p "$D/root/tmp"', 'chmod 1777 "$D/root/tmp"']
    for path in map(shlex.quote, filter(os.path.exists, shown)):
        script += [f'mkdir -p "$D/root"{path}', f'mount --rbind {path} "$D/root"{path}']
    script += mounts
    return (*_mounting("; ".join(script))(place), "chroot", root)


ENVIRONMENTS: Sequence[Environment] = (
    Environment("plain"),
    # limits
    Environment("2 GiB of addresses", _limited(f"--as={2 * _GIB}")),
    Environment("1 GiB of data", _limited(f"--data={_GIB}")),
    Environment("48 open files", _limited("--nofile=48")),
    Environment("one process", _limited("--nproc=1"), root_only=True, alone=True),
    Environment("100 processes", _limited("--nproc=100"), alone=True),
    Environment("small stack", _limited("--stack=262144")),
    Environment(
        "other limits",
        _limited(
            "--stack=unlimited",
            "--core=unlimited",
            f"--fsize={16 << 20}",
            "--cpu=60",
            "--memlock=0",
        ),
    ),
    # streams
    Environment("no input", stdin="closed"),
    Environment("input from a file", stdin="file"),
    Environment("input from a socket", stdin="socket"),
    Environment("input from a terminal", stdin="terminal"),
    Environment("no standard error", _shell("exec 2>&-"), alone=True),
    Environment("no input nor standard error", _shell("exec 2>&-"), stdin="closed"),
    # what a process inherits
    Environment("directory deleted", _shell('mkdir "$D/gone"; cd "$D/gone"; rmdir "$D/gone"')),
    Environment("umask 0", _shell("umask 0")),
    Environment("ended children ignored", _shell("trap '' CHLD"), alone=True),
    Environment(
        "started otherwise",
        _shell('umask 077; set -- setsid --wait nice -n 19 chrt --batch 0 setarch -R "$@"'),
    ),
    Environment("signals ignored", _shell("trap '' HUP INT PIPE TERM XFSZ")),
    # variables
    Environment("no HOME nor PATH", env={"HOME": None, "PATH": None}),
    Environment(
        "odd variables",
        env={
            "HOME": "/nonexistent",
            "PATH": f":.:relative:/nonexistent:{os.defpath}:",
            "LC_ALL": "tr_TR.ISO-8859-9",
            "LANGUAGE": "tr",
            "LD_LIBRARY_PATH": "/nonexistent",
        },
    ),
    Environment("no variables", _words("env", "-i", f"PATH={os.defpath}")),
    Environment("LC_ALL=POSIX", env={"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0"}),
    Environment("ASCII", env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}),
    Environment("odd Python", env={"PYTHONPATH": "/nonexistent", "PYTHONOPTIMIZE": "2"}),
    # temporary files
    Environment("TMPDIR absent", env={"TMPDIR": "/nonexistent"}),
    Environment("TMPDIR is /proc", env={"TMPDIR": "/proc"}),
    Environment(
        "TMPDIR noexec",
        _mounting(
            'mkdir "$D/t"; mount -t tmpfs -o noexec,nosuid,nodev t "$D/t"; export TMPDIR=$D/t'
        ),
        root_only=True,
    ),
    Environment(
        "TMPDIR read-only",
        _mounting('mkdir "$D/t"; mount -t tmpfs -o ro t "$D/t"; export TMPDIR="$D/t"'),
        root_only=True,
    ),
    Environment(
        "TMPDIR of root alone", _shell('mkdir -m 700 "$D/t"; export TMPDIR="$D/t"'), root_only=True
    ),
    Environment(
        "all read-only",
        _mounting(
            'mount --bind "$D" "$D"; for T in /tmp /var/tmp; do mount --rbind $T $T;'
            " mount -o remount,bind,ro $T; done; cd /proc"
        ),
        env={"TMPDIR": None},
        root_only=True,
    ),
    # rights
    Environment("no new privileges", _words("setpriv", "--no-new-privs")),
    Environment("Docker, no new privileges", _bounded(_DOCKER, "--no-new-privs"), root_only=True),
    Environment(
        "Docker, unshare refused",
        lambda place: (*_bounded(_DOCKER)(place), *refusing("unshare", errno.EPERM)),
        root_only=True,
    ),
    Environment("unshare refused", lambda place: refusing("unshare", errno.EPERM)),
    Environment("no capability", _bounded(""), root_only=True, notes="needs CAP_SETUID"),
    Environment("no CAP_SETUID", _without("setuid"), root_only=True, notes="needs CAP_SETUID"),
    Environment("no CAP_SETGID", _without("setgid"), root_only=True, notes="needs CAP_SETGID"),
    Environment(
        "no CAP_KILL, CAP_CHOWN, CAP_SYS_RESOURCE",
        _without("kill,-chown,-sys_resource"),
        root_only=True,
    ),
    Environment("no CAP_SYS_ADMIN", _without("sys_admin"), root_only=True),
    Environment("no CAP_DAC_OVERRIDE", _without("dac_override"), root_only=True),
    Environment(
        "capabilities handed on",
        _words("setpriv", f"--inh-caps={_SOME}", f"--ambient-caps={_SOME}"),
        root_only=True,
    ),
    Environment(
        "capabilities kept",
        _words("setpriv", "--securebits=+no_setuid_fixup"),
        root_only=True,
    ),
    # namespaces
    Environment(
        "user namespace of root",
        lambda place: mapped([(0, 0, 1)]),
        root_only=True,
        notes="this user namespace has no other",
    ),
    Environment(
        "user namespace of two", lambda place: mapped([(0, 0, 1), (1000, 1000, 1)]), root_only=True
    ),
    Environment(
        "own user namespace",
        _words("unshare", "--user", "--map-root-user"),
        notes="this user namespace has no other",
    ),
    Environment("unmapped user namespace", _words("unshare", "--user")),
    Environment("network namespace", _words("unshare", "--net"), root_only=True),
    Environment(
        "PID namespace",
        _words("unshare", "--pid", "--fork", "--mount-proc"),
        root_only=True,
        alone=True,
    ),
    Environment(
        "PID namespace, other /proc",
        _words("unshare", "--pid", "--fork"),
        root_only=True,
        alone=True,
    ),
    Environment(
        "hidden processes", _mounting("mount -t proc -o hidepid=2 proc /proc"), root_only=True
    ),
    Environment("chroot", lambda place: _chroot(place), root_only=True),
    Environment(
        "chroot with /proc",
        lambda place: _chroot(place, 'mkdir -p "$D/root/proc"; mount -t proc proc "$D/root/proc"'),
        root_only=True,
    ),
    # control groups
    Environment(
        "four tasks",
        lambda place: _in_cgroup(place, "pids.max", 4),
        root_only=True,
        alone=True,
    ),
)


def as_user(place: Path, number: int = USER) -> list[Argument]:
    """The words that run a command as a user without any right, who can run this Python.

    Where it lies below directories of root alone, these are shown empty but for that. Needs root.
    """
    ids = [f"--reuid={number}", f"--regid={number}", "--clear-groups", "--inh-caps=-all"]
    words: list[Argument] = [tool("setpriv"), *ids]
    tops = {path: _closed_to_others(Path(path)) for path in _PYTHON}
    closed = [path for path in sorted(tops) if tops[path] is not None]
    kept = [shlex.quote(str(place / str(index))) for index in range(len(closed))]
    shown = [shlex.quote(path) for path in closed]
    hidden = sorted({shlex.quote(str(tops[path])) for path in closed})
    script = ["set -e"]
    for source, copy in zip(shown, kept, strict=True):
        script += [f"mkdir {copy}", f"mount --rbind {source} {copy}"]
    script += [f"mount -t tmpfs -o mode=755 shown {top}" for top in hidden]
    for source, copy in zip(shown, kept, strict=True):
        script += [f"mkdir -p {source}", f"mount --rbind {copy} {source}"]
    script.append('exec "$@"')
    if not closed:
        return words
    return [tool("unshare"), "-m", "/bin/sh", "-c", "\n".join(script), "sh", *words]


def _closed_to_others(path: Path) -> Path | None:
    """The first directory on the way to a path that others may not search, or None."""
    return next((each for each in reversed(path.parents) if not each.stat().st_mode & 0o001), None)
