# SPDX-License-Identifier: Apache-2.0
"""perf.data made to order, in either byte order: headers, records, features."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from buildidfs.formats.perf.attributes import Layouts

IP, TID, TIME, CALLCHAIN, CPU, PERIOD, IDENTIFIER = (1 << bit for bit in (0, 1, 2, 5, 7, 8, 16))
READ = 1 << 4

USUAL = IDENTIFIER | IP | TID | TIME
"""What events of these profiles record unless a test says otherwise."""

USER, KERNEL = 2, 1
EXEC = 1 << 13
HAS_BUILD_ID = 1 << 14


class Sample(NamedTuple):
    """A sample as `Layouts` decodes it."""

    ip: int
    pid: int
    tid: int
    time: int | None
    chain: tuple[int, ...]


def sample_of(
    layouts: Layouts, data: bytes, at: int, size: int, *, chains: bool = False
) -> Sample | None:
    """The sample at ``at``, with its call chain if ``chains``."""
    head = layouts.head(data, at, size)
    return head and Sample(*head, layouts.chain(data, at, size) if chains else ())


class PerfWriter:
    """Bytes of records and files. ``sample_type`` is that of the only event, number 7."""

    def __init__(self, order: str = "<", sample_type: int = USUAL) -> None:
        self.order = order
        self.sample_type = sample_type

    def pack(self, form: str, *values: int) -> bytes:
        """struct.pack in the byte order of the file."""
        return struct.pack(self.order + form, *values)

    def attr(
        self, sample_type: int | None = None, read_format: int = 0, clockid: int = -1
    ) -> bytes:
        """struct perf_event_attr with sample_id_all."""
        flags = 1 << 18 | (1 << 25 if clockid >= 0 else 0)
        if self.order == ">":
            flags = int(f"{flags:064b}"[::-1], 2)
        wanted = self.sample_type if sample_type is None else sample_type
        words = self.pack("IIQQQQQ", 1, 128, 0, 4000, wanted, read_format, flags)
        return words.ljust(92, b"\0") + self.pack("i", max(clockid, 0)) + bytes(32)

    def record(self, kind: int, body: bytes, misc: int = USER) -> bytes:
        """One record, filled up to a multiple of 8 bytes."""
        body += bytes(-len(body) % 8)
        return self.pack("IHH", kind, misc, 8 + len(body)) + body

    def trailer(self, pid: int, time: int) -> bytes:
        """What records other than samples end with."""
        fields = b""
        if self.sample_type & TID:
            fields += self.pack("II", pid, pid)
        if self.sample_type & TIME:
            fields += self.pack("Q", time)
        if self.sample_type & CPU:
            fields += self.pack("II", 0, 0)
        if self.sample_type & IDENTIFIER:
            fields += self.pack("Q", 7)
        return fields

    def mmap(
        self, pid: int, start: int, size: int, name: bytes, *, time: int = 0, misc: int = USER
    ) -> bytes:
        """PERF_RECORD_MMAP."""
        body = self.pack("IIQQQ", pid, pid, start, size, 0) + name + b"\0"
        return self.record(1, body + bytes(-len(body) % 8) + self.trailer(pid, time), misc)

    def mmap2(
        self,
        pid: int,
        start: int,
        size: int,
        name: bytes,
        *,
        time: int = 0,
        dev: tuple[int, int] = (8, 1),
        inode: int = 5,
        generation: int = 0,
        build_id: bytes = b"",
        offset: int = 0,
        misc: int = USER,
    ) -> bytes:
        """PERF_RECORD_MMAP2, with a build ID if one is given."""
        body = self.pack("IIQQQ", pid, pid, start, size, offset)
        if build_id:
            misc |= HAS_BUILD_ID
            body += bytes((len(build_id), 0, 0, 0)) + build_id.ljust(20, b"\0")
        else:
            body += self.pack("IIQQ", *dev, inode, generation)
        body += self.pack("II", 5, 2) + name + b"\0"
        return self.record(10, body + bytes(-len(body) % 8) + self.trailer(pid, time), misc)

    def fork(self, pid: int, parent: int, time: int = 0, *, tid: int = 0, misc: int = 0) -> bytes:
        """PERF_RECORD_FORK; of a thread with ``tid``."""
        body = self.pack("IIIIQ", pid, parent, tid or pid, parent, time)
        return self.record(7, body + self.trailer(pid, time), misc)

    def comm(self, pid: int, name: bytes, time: int = 0, *, exec_: bool = False) -> bytes:
        """PERF_RECORD_COMM."""
        body = self.pack("II", pid, pid) + name + b"\0"
        body += bytes(-len(body) % 8)
        return self.record(3, body + self.trailer(pid, time), EXEC if exec_ else 0)

    def namespaces(self, pid: int, inodes: Iterable[int], time: int = 0) -> bytes:
        """PERF_RECORD_NAMESPACES, of the initial thread."""
        numbers = list(inodes)
        body = self.pack("IIQ", pid, pid, len(numbers))
        body += b"".join(self.pack("QQ", 4, inode) for inode in numbers)
        return self.record(16, body + self.trailer(pid, time), 0)

    def sample(
        self, pid: int, ip: int, time: int, *, misc: int = USER, chain: Iterable[int] = ()
    ) -> bytes:
        """PERF_RECORD_SAMPLE."""
        fields = b""
        kinds = self.sample_type
        if kinds & IDENTIFIER:
            fields += self.pack("Q", 7)
        if kinds & IP:
            fields += self.pack("Q", ip)
        if kinds & TID:
            fields += self.pack("II", pid, pid)
        if kinds & TIME:
            fields += self.pack("Q", time)
        if kinds & CPU:
            fields += self.pack("II", 0, 0)
        if kinds & PERIOD:
            fields += self.pack("Q", 1)
        if kinds & CALLCHAIN:
            addresses = list(chain)
            fields += self.pack(f"{1 + len(addresses)}Q", len(addresses), *addresses)
        return self.record(9, fields, misc)

    def deferred(self, pid: int, number: int, chain: Iterable[int], time: int) -> bytes:
        """PERF_RECORD_CALLCHAIN_DEFERRED."""
        addresses = list(chain)
        body = self.pack(f"{2 + len(addresses)}Q", number, len(addresses), *addresses)
        return self.record(22, body + self.trailer(pid, time))

    def build_id(
        self, name: bytes, build_id: bytes, misc: int = USER, *, sized: bool = True
    ) -> bytes:
        """PERF_RECORD_HEADER_BUILD_ID, as it also stands in the table behind the records."""
        size = bytes((len(build_id), 0, 0, 0)) if sized else bytes(4)
        body = self.pack("i", -1) + build_id.ljust(20, b"\0") + size + name + b"\0"
        body += bytes(-(8 + len(body)) % 8)
        kind_misc = misc | (1 << 15 if sized else 0)
        return self.pack("IHH", 67, kind_misc, 8 + len(body)) + body

    def text(self, value: bytes) -> bytes:
        """A feature that is one string."""
        padded = value.ljust(64, b"\0")
        return self.pack("I", len(padded)) + padded

    def file(
        self,
        records: bytes,
        features: Mapping[int, bytes] | None = None,
        attrs: Iterable[bytes] | None = None,
        ids: Iterable[Iterable[int]] = ((7,),),
    ) -> bytes:
        """A file of these records."""
        features = dict(sorted((features or {}).items()))
        all_attrs = [self.attr()] if attrs is None else list(attrs)
        numbers = [list(each) for each in ids]
        at = 104
        id_sections, id_bytes = [], b""
        for each in numbers:
            packed = self.pack(f"{len(each)}Q", *each)
            id_sections.append((at + len(id_bytes), len(packed)))
            id_bytes += packed
        attrs_at = at + len(id_bytes)
        table = b"".join(
            attr + self.pack("QQ", *section)
            for attr, section in zip(all_attrs, id_sections, strict=True)
        )
        data_at = attrs_at + len(table)
        flags = sum(1 << number for number in features)
        words = [flags >> 64 * number & (1 << 64) - 1 for number in range(4)]
        magic = b"PERFILE2" if self.order == "<" else b"2ELIFREP"
        attr_size = len(all_attrs[0]) + 16 if all_attrs else 144
        header = magic + self.pack(
            "QQQQQQQQ4Q", 104, attr_size, attrs_at, len(table), data_at, len(records), 0, 0, *words
        )
        sections, at = b"", data_at + len(records) + 16 * len(features)
        for content in features.values():
            sections += self.pack("QQ", at, len(content))
            at += len(content)
        behind = sections + b"".join(features.values())
        return header + id_bytes + table + records + behind

    def pipe(self, records: bytes, features: Mapping[int, bytes] | None = None) -> bytes:
        """The same as it is written to a pipe."""
        magic = b"PERFILE2" if self.order == "<" else b"2ELIFREP"
        beginning = magic + self.pack("Q", 16)
        beginning += self.record(64, self.attr() + self.pack("Q", 7), 0)
        for number, content in (features or {}).items():
            body = self.pack("Q", number) + content
            beginning += self.pack("IHH", 80, 0, 8 + len(body)) + body
        return beginning + records
