# SPDX-License-Identifier: Apache-2.0
"""buildidfs.formats.kallsyms: the symbols of a kernel and its modules."""

from __future__ import annotations

from buildidfs.formats.kallsyms import Kallsyms

TEXT = b"""\
0000000000000000 A fixed_percpu_data
ffffffff81000000 T _stext
ffffffff81000000 T _text
ffffffff81000040 t local_copy
ffffffff81000040 T __do_sys_read
ffffffff81000040 T do_read
ffffffff81000040 W weak_name_that_is_long
ffffffff81000080 t $x
ffffffff810000c0 T last
ffffffff81000100 T _etext
ffffffff81000100 A absolute
ffffffffa0001000 t ext4_open\t[ext4]
ffffffffa0001800 t ext4_read\t[ext4]
ffffffffa0000010 t other\t[nf_nat]
not a line
"""


def test_symbol_that_contains_an_address() -> None:
    symbols = Kallsyms(TEXT)
    assert symbols.find(0xFFFFFFFF810000BF) == (0xFFFFFFFF81000040, b"do_read")
    assert symbols.find(0xFFFFFFFF810000C0) == (0xFFFFFFFF810000C0, b"last")
    assert symbols.find(0xFFFFFFFF80000000) is None


def test_modules_are_apart() -> None:
    symbols = Kallsyms(TEXT)
    assert symbols.find(0xFFFFFFFFA0001900, b"ext4") == (0xFFFFFFFFA0001800, b"ext4_read")
    assert symbols.first_of(b"ext4") == 0xFFFFFFFFA0001000
    assert symbols.find(0xFFFFFFFFA0001900, b"xfs") is None
    assert symbols.first_of(b"xfs") is None


def test_addresses_of_marks() -> None:
    symbols = Kallsyms(TEXT)
    assert symbols.address_of(b"_etext") == 0xFFFFFFFF81000100
    assert symbols.address_of(b"ext4_open") is None


def test_text_without_addresses_has_no_symbols() -> None:
    """As users without CAP_SYSLOG see it."""
    symbols = Kallsyms(b"0000000000000000 T _text\n0000000000000000 T _etext\n")
    assert (symbols.address_of(b"_text"), symbols.find(1 << 63)) == (None, None)
