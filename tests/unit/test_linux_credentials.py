# SPDX-License-Identifier: Apache-2.0
"""A process that becomes another user has no right of root left."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from buildidfs.formats import proc_text
from buildidfs.linux import credentials, inodes, procfs, syscalls
from tests.support.harness.children import cat_program, needs_root, running

pytestmark = needs_root("becomes another user")

_USER = 65534


def in_a_child(what: Callable[[], str]) -> str:
    """Return the result of a function in a child process, or the name of its error."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            try:
                said = what()
            except OSError as error:
                said = errno.errorcode[error.errno or 0]
            os.write(writing, said.encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as file:
        said = file.read()
    assert os.waitpid(pid, 0)[1] == 0
    return said


# --- buildidfs.linux.capabilities: names as the system has them, and what a scan real


_PR_CAPBSET_READ = 23
_PR_SET_KEEPCAPS = 8
_CAPABILITY_VERSION_3 = 0x20080522
_NOBODY = 65534

_FOR_SCAN = frozenset({"CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH", "CAP_CHECKPOINT_RESTORE"})


def test_names_are_those_of_the_kernel_headers() -> None:
    header = Path("/usr/include/linux/capability.h")
    if not header.exists():
        pytest.skip("the kernel headers are not installed")
    defined = re.findall(r"^#define (CAP_[A-Z_]+)\s+(\d+)$", header.read_text(), re.MULTILINE)
    assert len(defined) > 35
    for name, number in defined:
        assert credentials.capability_names(1 << int(number)) == {name}


def test_bits_become_names() -> None:
    assert credentials.capability_names(0) == frozenset()
    assert credentials.capability_names(1 << 19 | 1 << 2) == {
        "CAP_SYS_PTRACE",
        "CAP_DAC_READ_SEARCH",
    }
    assert credentials.capability_names(1 << 63) == {"63"}


def test_effective_capabilities_are_those_of_the_kernel() -> None:
    bits = 0
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            bits = int(line.split()[1], 16)
    assert credentials.effective_capabilities() == credentials.capability_names(bits)
    assert len(credentials.effective_capabilities()) == bits.bit_count()


@pytest.mark.parametrize(
    ("held", "missing"),
    [
        (frozenset(), ["CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH", "CAP_CHECKPOINT_RESTORE"]),
        (_FOR_SCAN, []),
        (_FOR_SCAN - {"CAP_SYS_PTRACE"}, ["CAP_SYS_PTRACE"]),
        (_FOR_SCAN - {"CAP_CHECKPOINT_RESTORE"} | {"CAP_SYS_ADMIN"}, []),
        (_FOR_SCAN - {"CAP_DAC_READ_SEARCH"} | {"CAP_DAC_OVERRIDE"}, []),
        (frozenset({"CAP_SYS_ADMIN"}), ["CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH"]),
    ],
)
def test_missing_capabilities_are_named(
    monkeypatch: pytest.MonkeyPatch, held: frozenset[str], missing: list[str]
) -> None:
    monkeypatch.setattr(credentials, "effective_capabilities", lambda: held)
    assert credentials.missing_for_scan() == missing


def _become_nobody_with(held: frozenset[str]) -> None:
    """Give up root and every capability but those; only for a process that is about to end."""
    libc = syscalls.libc
    low = high = 0
    for bit in range(64):
        if credentials.capability_names(1 << bit) <= held:
            if bit < 32:
                low |= 1 << bit
            else:
                high |= 1 << (bit - 32)
    assert libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0) == 0
    os.setgroups([])
    os.setresgid(_NOBODY, _NOBODY, _NOBODY)
    os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    header = ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITY_VERSION_3, 0))
    data = ctypes.create_string_buffer(struct.pack("=6I", low, low, 0, high, high, 0))
    assert libc.capset(header, data) == 0
    assert credentials.effective_capabilities() == held


def _error_of_looking(pid: int, held: frozenset[str]) -> int:
    """The errno a process with these capabilities gets from capturing what ``pid`` maps."""
    child = os.fork()
    if not child:
        code = 255
        try:
            _become_nobody_with(held)
            try:
                fd = procfs.open_pid(pid)
                first = next(proc_text.mappings_in(procfs.maps(fd)))
                os.read(procfs.open_map_file(fd, first.start, first.end), 4)
                code = 0
            except OSError as error:
                code = error.errno or 254
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.root
@needs_root("gives capabilities away")
def test_scan_works_with_exactly_the_named_capabilities(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another user, at a process of root that runs a file only root may read."""
    if lacking := _FOR_SCAN - credentials.effective_capabilities():
        pytest.skip(f"this root lacks {', '.join(sorted(lacking))}")
    program = tmp_path / "cat"
    program.write_bytes(cat_program().read_bytes())
    program.chmod(0o700)
    everything = _FOR_SCAN | {"CAP_SYS_ADMIN", "CAP_DAC_OVERRIDE"}
    candidates = [_FOR_SCAN, frozenset[str]()]
    candidates += [_FOR_SCAN - {name} for name in sorted(_FOR_SCAN)]
    candidates += [everything - {name} for name in sorted(_FOR_SCAN)]
    with running([program]) as child:
        for held in candidates:
            error = _error_of_looking(child.pid, held & credentials.effective_capabilities())
            assert error != 255, "the child failed to become nobody"
            with monkeypatch.context() as patch:
                patch.setattr(credentials, "effective_capabilities", lambda held=held: held)
                missing = credentials.missing_for_scan()
            assert bool(error) == bool(missing), (sorted(held), os.strerror(error), missing)


def test_a_thread_opens_files_as_a_user_and_other_threads_as_root(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.write_text("x")
    private.chmod(0o640)  # the group of root is not kept either
    own = tmp_path / "own"
    own.write_text("x")
    own.chmod(0o600)
    os.chown(own, _USER, _USER)
    private_fd, own_fd = os.open(private, os.O_PATH), os.open(own, os.O_PATH)

    before = syscalls.libc.prctl(syscalls.PR_GET_DUMPABLE, 0, 0, 0, 0)

    def open_both() -> str:
        other = ThreadPoolExecutor(1)
        other.submit(os.getpid).result()  # a thread inherits the rights of the one that starts it
        with other, credentials.opening_as(_USER, _USER):
            os.close(inodes.reopen_regular(own_fd))
            other.submit(lambda: os.close(inodes.reopen_regular(private_fd))).result()
            try:
                os.close(inodes.reopen_regular(private_fd))
            except PermissionError:
                refused = True
        os.close(inodes.reopen_regular(private_fd))
        dumpable = syscalls.libc.prctl(syscalls.PR_GET_DUMPABLE, 0, 0, 0, 0)
        return f"{refused} {os.getgroups()} {dumpable}"

    try:
        assert in_a_child(open_both) == f"True {os.getgroups()} {before}"
    finally:
        os.close(private_fd)
        os.close(own_fd)


def test_a_user_opens_files_as_that_user_only() -> None:
    def change() -> str:
        os.setgroups([])
        os.setresgid(_USER, _USER, _USER)
        os.setresuid(_USER, _USER, _USER)
        with credentials.opening_as(_USER, _USER):
            pass
        with credentials.opening_as(_USER - 1, _USER):
            return "changed"

    assert in_a_child(change) == "EPERM"


def test_remedy_for_hidden_addresses_is_no_capability_that_is_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for held, remedy in (("CAP_SYSLOG", "kptr_restrict=1"), ("CAP_CHOWN", "CAP_SYSLOG")):
        monkeypatch.setattr(credentials, "effective_capabilities", lambda held=held: {held})
        assert remedy in credentials.remedy_for_hidden_addresses()
