# SPDX-License-Identifier: Apache-2.0
"""The exchange between the catcher and the kernel's program, whatever the order of events."""

from __future__ import annotations

from buildidfs.capture.live.first_touch import Touch, Touches
from buildidfs.capture.live.process_table import Home
from buildidfs.formats.perf.records import Mapped

_DEV = (8, 1)
_MOUNTS = 77


class Program:
    """Records what the catcher lets the program know."""

    def __init__(self) -> None:
        self.known: set[bytes] = set()
        self.data: list[Touch] = []

    def know(self, key: bytes) -> None:
        self.known.add(key)

    def know_data(self, touch: Touch) -> None:
        self.data.append(touch)

    def forget(self, key: bytes) -> None:
        self.known.discard(key)


def _home() -> Home:
    home = Home()
    home.mnt_ns_id = _MOUNTS
    return home


def _record(inode: int = 5, pid: int = 100) -> Mapped:
    return Mapped(1, pid, 0x1000, 0x2000, 0, b"/usr/bin/true", _DEV, inode, 0)


def _touch(ctime_ns: int = 1, inode: int = 5, mnt_ns_id: int = _MOUNTS) -> Touch:
    return Touch(b"%d %d %d" % (inode, mnt_ns_id, ctime_ns), _DEV, inode, mnt_ns_id, ctime_ns,
                 False)  # fmt: skip


def _made() -> tuple[Touches, Program]:
    program = Program()
    return Touches(program), program  # type: ignore[arg-type]


def test_recognised_file_is_known_to_the_program_and_skipped_afterwards() -> None:
    touches, program = _made()
    touch, record, home = _touch(), _record(), _home()
    touches.add(touch)
    assert not touches.skips(record, home)
    touches.recognise(record, home, 1, b"place")
    assert list(touches.settle([touch])) == []
    assert program.known == {touch.key}
    assert touches.skips(record, home)


def test_touch_that_is_read_after_its_record_is_known_too() -> None:
    touches, program = _made()
    record, home = _record(), _home()
    assert not touches.skips(record, home)
    touches.recognise(record, home, 1, b"place")
    touches.add(_touch())
    assert list(touches.settle([_touch()])) == []
    assert program.known == {_touch().key}


def test_changed_file_is_looked_at_although_its_record_was_skipped() -> None:
    touches, program = _made()
    home = _home()
    touches.recognise(_record(), home, 1, b"place")
    later = _record(pid=200)
    assert touches.skips(later, home)
    changed = _touch(ctime_ns=2)
    touches.add(changed)
    assert list(touches.settle([changed])) == [(later, home)]
    assert changed.key not in program.known
    assert not program.data


def test_reported_change_stops_the_skipping_of_records() -> None:
    touches, _ = _made()
    touches.recognise(_record(), _home(), 1, b"place")
    touches.add(_touch(ctime_ns=2))
    assert not touches.skips(_record(), _home())


def test_same_file_in_another_mount_namespace_is_not_skipped() -> None:
    touches, _ = _made()
    touches.recognise(_record(), _home(), 1, b"place")
    other = _home()
    other.mnt_ns_id = _MOUNTS + 1
    assert not touches.skips(_record(), other)


def test_file_that_no_record_names_is_data() -> None:
    touches, program = _made()
    touches.add(_touch())
    assert list(touches.settle([_touch()])) == []
    assert program.data == [_touch()]
    assert not program.known


def test_new_file_is_neither_known_nor_data() -> None:
    touches, program = _made()
    touches.add(_touch())
    assert not touches.skips(_record(), _home())
    assert list(touches.settle([_touch()])) == []
    assert not program.known
    assert not program.data


def test_forgotten_file_is_reported_again() -> None:
    touches, program = _made()
    touches.add(_touch())
    touches.recognise(_record(), _home(), 1, b"place")
    touches.forget([b"place", b"another"])
    assert not program.known
    assert not touches.skips(_record(), _home())


def test_memory_is_bounded() -> None:
    program = Program()
    touches = Touches(program, 4)  # type: ignore[arg-type]
    for inode in range(20):
        touches.add(_touch(inode=inode))
        assert not touches.skips(_record(inode=inode), _home())
        touches.recognise(_record(inode=inode), _home(), 1, b"%d" % inode)
    assert len(program.known) == 4
    assert touches.skips(_record(inode=19), _home())
    assert not touches.skips(_record(inode=0), _home())
