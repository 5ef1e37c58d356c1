# SPDX-License-Identifier: Apache-2.0
"""buildidfs.linux.capabilities: names as the system has them, and what a scan really needs."""

from __future__ import annotations

import ctypes
import os
import re
import struct
from pathlib import Path

import pytest

from buildidfs.formats import procmaps
from buildidfs.linux import capabilities, procfs, syscalls
from tests.support.children import cat_program, needs_root, running

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
        assert capabilities.names(1 << int(number)) == {name}


def test_bits_become_names() -> None:
    assert capabilities.names(0) == frozenset()
    assert capabilities.names(1 << 19 | 1 << 2) == {"CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH"}
    assert capabilities.names(1 << 63) == {"63"}


def test_effective_is_what_the_kernel_says() -> None:
    bits = 0
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            bits = int(line.split()[1], 16)
    assert capabilities.effective() == capabilities.names(bits)
    assert len(capabilities.effective()) == bits.bit_count()


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
def test_what_is_missing_is_named(held: frozenset[str], missing: list[str]) -> None:
    assert capabilities.missing_for_scan(held) == missing


def test_what_this_process_lacks() -> None:
    held = capabilities.effective()
    assert capabilities.missing_for_scan() == capabilities.missing_for_scan(held)


def _become_nobody_with(held: frozenset[str]) -> None:
    """Give up root and every capability but those; only for a process that is about to end."""
    libc = syscalls.libc
    low = high = 0
    for bit in range(64):
        if capabilities.names(1 << bit) <= held:
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
    assert capabilities.effective() == held


def _error_of_looking(pid: int, held: frozenset[str]) -> int:
    """The errno a process with these capabilities gets from capturing what ``pid`` maps."""
    child = os.fork()
    if not child:
        code = 255
        try:
            _become_nobody_with(held)
            try:
                fd = procfs.open_pid(pid)
                first = next(procmaps.parse(procfs.maps(fd)))
                os.read(procfs.open_map_file(fd, first.start, first.end), 4)
                code = 0
            except OSError as error:
                code = error.errno or 254
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.root
@needs_root("gives capabilities away")
def test_a_scan_needs_what_we_say_and_no_more(tmp_path: Path) -> None:
    """As another user, at a process of root that runs a file only root may read."""
    if lacking := _FOR_SCAN - capabilities.effective():
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
            error = _error_of_looking(child.pid, held & capabilities.effective())
            assert error != 255, "the child failed to become nobody"
            missing = capabilities.missing_for_scan(held)
            assert bool(error) == bool(missing), (sorted(held), os.strerror(error), missing)
