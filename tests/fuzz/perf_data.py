# SPDX-License-Identifier: Apache-2.0
"""The decoders of perf.data, and of what says who may read a file."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final

import zstandard

from buildidfs.errors import UsageError
from buildidfs.formats import posix_acl
from buildidfs.formats.perf import (
    address_spaces,
    attributes,
    headers,
    records,
)
from buildidfs.formats.perf import record_stream as perf_stream
from tests.fuzz import elf_mutation
from tests.fuzz.target import MEGABYTE, Target, filled, refusal
from tests.support.elf.perfwriter import CALLCHAIN, READ, USUAL, PerfWriter, sample_of
from tests.support.filesystems.filereader import FileReader

# --- perf.data -----------------------------------------------------------------------------------


def _check_perfdata(data: bytes) -> None:
    """As coverage and unpacking read it; whatever is wrong with it is told in words."""
    reader = FileReader(data)
    error = refusal(lambda: _read_profile(reader, data), UsageError)
    assert error is None or str(error)
    assert reader.bytes_read <= 8 * len(data) + (1 << 21)


def _read_profile(reader: FileReader, data: bytes) -> None:
    header = headers.parse_header(reader, len(data))
    for number in range(headers.FEATURES):
        content = headers.feature(reader, header, number)
        headers.text(content, header.order)
        headers.clock(content, header.order)
        headers.times(content, header.order)
        headers.moved_traces(content, header.order, [0, 8, 16], [8, 16, 0])
    for named in headers.build_id_table(reader, header):
        assert len(named.build_id) <= 20
        again = headers.pack_named(named, header.order)
        assert len(again) % 8 == 0
    layouts = attributes.Layouts(header.attrs, header.order)
    events, spaces = records.Events(layouts, header.order), address_spaces.Spaces()
    rewriter = records.Rewriter(layouts, header.order)
    stream = perf_stream.RecordStream(reader, header.data, header.order, is_pipe=header.is_pipe)
    for raw in stream:
        assert raw.size >= perf_stream.HEADER_SIZE
        assert raw.at + raw.size <= len(raw.data)
        if raw.kind == 9:
            sample = sample_of(layouts, raw.data, raw.at, raw.size, chains=True)
            if sample is not None:
                spaces.find(sample.pid, sample.time or 0, sample.ip)
            continue
        event = events.read(raw)
        if event is not None:
            spaces.add(event, getattr(event, "time", 0) or 0)
        if isinstance(event, records.Mapped):
            assert event.start <= event.end <= 1 << 64
            rewriter.mapped(raw, event.build_id or elf_mutation.BUILD_ID, b"/other")
    for pid, image, _, time in islice(spaces.everything(), 10):
        assert spaces.mapped(pid, image)
        spaces.mount_namespace(pid, time)


def _records(writer: PerfWriter) -> bytes:
    return b"".join(
        (
            writer.comm(1, b"app", 1, exec_=True),
            writer.mmap2(1, 0x1000, 0x1000, b"/usr/bin/app", time=2),
            writer.mmap2(
                1, 0x4000, 0x1000, b"/usr/lib/x.so", time=2, build_id=elf_mutation.BUILD_ID
            ),
            writer.mmap(1, 0x8000, 0x1000, b"[vdso]", time=3),
            writer.namespaces(1, range(7), 3),
            writer.sample(1, 0x1010, 4, chain=[0x1010, 0x4010]),
            writer.fork(2, 1, 5),
            writer.sample(2, 0x4010, 6),
            writer.record(68, b""),
        )
    )


def _seed_perfdata() -> Iterator[bytes]:
    for order in "<>":
        for sample_type in (USUAL, USUAL | CALLCHAIN | READ):
            writer = PerfWriter(order, sample_type)
            table = writer.build_id(b"/usr/bin/app", elf_mutation.BUILD_ID)
            features = {2: table, 3: writer.text(b"host"), 8: writer.pack("QQ", 1, 9)}
            yield writer.file(_records(writer), features)
        yield writer.pipe(_records(writer), {3: writer.text(b"host")})


def _huge_perfdata() -> Iterator[bytes]:
    writer = PerfWriter()
    for unit in (
        *(writer.record(68, b""), writer.mmap2(1, 0x1000, 0x1000, b"/usr/bin/app", time=2)),
        *(writer.fork(1, 2, 3), writer.sample(1, 0x1010, 4), writer.namespaces(1, range(7), 3)),
        *(writer.comm(1, b"x", exec_=True), writer.record(9, b""), writer.record(81, bytes(56))),
    ):
        yield writer.file(filled(unit, MEGABYTE - 4096))
    some = range((MEGABYTE - 4096) // 104)
    yield writer.file(
        b"".join(writer.mmap2(1, 4096 * (number % 7), 9999, b"/x", time=number) for number in some)
    )
    yield writer.file(
        b"".join(writer.mmap2(1, 4096 * number, 4096, b"/x%d" % number) for number in some)
    )
    yield writer.file(b"".join(writer.fork(number + 1, number, number) for number in range(17_000)))
    yield writer.file(
        b"", {2: filled(writer.build_id(b"x", elf_mutation.BUILD_ID), MEGABYTE - 4096)}
    )
    yield writer.file(b"", {2: filled(writer.pack("IHH", 67, 0, 8), MEGABYTE - 4096)})
    # samples between mappings, which the last mapping has replaced
    mapped = [writer.mmap2(1, 4096 * (256 + n), 4096, b"/x", time=10 + n) for n in range(5000)]
    mapped.append(writer.mmap2(1, 0, 1 << 20, b"/x", time=10**9))
    between = [writer.sample(1, 4096 * (n % 250), 2510 + n % 2500) for n in range(11_000)]
    yield writer.file(b"".join(mapped + between))
    attrs = [writer.attr()] * 4000
    yield writer.file(b"", attrs=attrs, ids=[(7,)] * 4000)
    mapped = writer.mmap2(1, 0x1000, 0x1000, b"/usr/bin/app", time=2)
    for unit in (writer.record(68, b""), mapped, writer.sample(1, 0x1010, 4)):
        yield writer.file(_compressed(writer, unit))


def _compressed(writer: PerfWriter, unit: bytes) -> bytes:
    """As many records as a megabyte of compressed ones can have: 128 KiB in about 20 bytes."""
    packed = zstandard.ZstdCompressor(level=1).compress(filled(unit, 64 << 20))
    packed *= 900_000 // len(packed)
    pieces = (packed[at : at + 60_000] for at in range(0, len(packed), 60_000))
    return b"".join(writer.record(81, piece) for piece in pieces)


# --- access control lists ------------------------------------------------------------------------


def _check_acl(data: bytes) -> None:
    error = refusal(lambda: posix_acl.certain_bits(data), ValueError)
    assert error is not None or 0 <= posix_acl.certain_bits(data) <= 0o777


def _seed_acl() -> Iterator[bytes]:
    entries = b"".join(
        kind.to_bytes(2, "little") + rights.to_bytes(2, "little") + who.to_bytes(4, "little")
        for kind, rights, who in (
            (1, 7, 0),
            (2, 5, 9),
            (4, 5, 0),
            (8, 4, 7),
            (16, 5, 0),
            (32, 1, 0),
        )
    )
    yield b"\2\0\0\0" + entries


def _huge_acl() -> Iterator[bytes]:
    (seed,) = _seed_acl()
    yield seed[:4] + filled(seed[4:], (1 << 16) - 8)
    yield seed[:4] + filled(seed[4:])


TARGETS: Final = {
    "perfdata": Target(
        _check_perfdata,
        _seed_perfdata,
        _huge_perfdata,
        (
            "perf.attributes",
            "perf.headers",
            "perf.records",
            "perf.address_spaces",
            "perf.record_stream",
        ),
    ),
    "acl": Target(_check_acl, _seed_acl, _huge_acl, ("posix_acl",)),
}
