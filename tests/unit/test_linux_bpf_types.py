# SPDX-License-Identifier: Apache-2.0
"""Offsets of fields in the running kernel, compared with those of the compiler's own type."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest

from buildidfs.linux import bpf
from buildidfs.linux.bpf import Btf

if TYPE_CHECKING:
    from pathlib import Path


def test_fields_of_the_running_kernel_have_their_offsets() -> None:
    types = Btf()
    # include/linux/list.h and include/linux/path.h: their layout never changed.
    assert types.offset("list_head", "next") == 0
    assert types.offset("list_head", "prev") == 8
    assert types.offset("path", "dentry") == 8


def test_field_of_a_structure_inside_another_adds_up() -> None:
    types = Btf()
    inner = types.offset("file", "f_path")
    assert types.offset("file", "f_path", "dentry") == inner + types.offset("path", "dentry")


def test_field_of_a_member_without_a_name_belongs_to_its_structure() -> None:
    assert Btf().offset("inode", "i_nlink") == Btf().offset("inode", "__i_nlink")


@pytest.mark.parametrize(
    "path", [("no_such_struct", "field"), ("path", "no_such_field"), ("path", "dentry", "x")]
)
def test_absent_field_is_a_lookup_error(path: tuple[str, ...]) -> None:
    with pytest.raises(LookupError):
        Btf().offset(*path)


def test_absent_tracepoint_is_not_found() -> None:
    assert Btf().tracepoint("sched_process_exec")
    with pytest.raises(FileNotFoundError):
        Btf().tracepoint("no_such_tracepoint")


@pytest.mark.parametrize("data", [b"", b"ELF", struct.pack("=HBBIIIII", 1, 1, 0, 24, 0, 0, 0, 0)])
def test_file_in_another_format_is_a_value_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    path = tmp_path / "vmlinux"
    path.write_bytes(data)
    monkeypatch.setattr(bpf, "_KERNEL", str(path))
    with pytest.raises(ValueError, match="BTF"):
        Btf()
