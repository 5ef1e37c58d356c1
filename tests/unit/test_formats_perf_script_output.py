# SPDX-License-Identifier: Apache-2.0
"""The text of perf script: who mapped what, and where the frames of a sample are."""

from __future__ import annotations

import msgspec
import pytest

from buildidfs.formats.perf.script_output import (
    KernelMapping,
    PrintedFrame,
    Script,
    ScriptLocation,
    parse_build_ids,
)
from buildidfs.model import BuildId

ID, OTHER = BuildId(b"\xaa" * 20), BuildId(b"\xbb" * 8)


def mmap(
    start: int, offset: int, path: str, build_id: BuildId | None = ID, *, pid: int = 7,
    size: int = 0x1000,
) -> bytes:  # fmt: skip
    what = "00:00 0 0" if build_id is None else f"<{build_id}>"
    at = f"{offset:#x}" if offset else "0"
    return (
        f"hot {pid} 1.0: PERF_RECORD_MMAP2 {pid}/{pid}: [{start:#x}({size:#x}) @ {at} {what}]:"
        f" r-xp {path}"
    ).encode()


def frames(
    text: bytes, script: Script | None = None
) -> list[tuple[PrintedFrame, ScriptLocation | None]]:
    """Each frame, and where it is by then, without its mapping."""
    script = script or Script()
    found = []
    for line in text.split(b"\n"):
        if (frame := script.line(line)) is not None:
            location = script.locate(frame)
            found.append((frame, location and msgspec.structs.replace(location, mapping=None)))
    return found


def places(text: bytes) -> list[ScriptLocation | None]:
    return [location for _, location in frames(text)]


CHAIN = b"""hot  7/7  2.000001: cpu-clock:ppp:
\tffffffff8140b275 rcu_core+0x15 ([kernel.kallsyms])
\t            1040 [unknown] (/app/hot)
\t            1139 main+0x2a (/app/hot)
\t    7f0000000010 [unknown] (/lib/x (deleted))
"""


def test_location_has_the_mapping() -> None:
    script = Script()
    script.line(mmap(0x55000000, 0x1000, "/app/hot"))
    for line in CHAIN.split(b"\n"):
        frame = script.line(line)
        if frame is not None and frame.dso == b"/app/hot":
            location = script.locate(frame)
            assert location is not None
            assert location.mapping == (0x55000000, 0x55001000, 0x1000)


def test_mappings_of_the_kernel_and_its_modules() -> None:
    script = Script()
    for at, size, reference, name in (
        (0xFFFFFFFF81000000, 0x1209988, 0xFFFFFFFF81000000, "[kernel.kallsyms]_text"),
        (0xFFFFFFFFA0000000, 0x9000, 0, "/lib/modules/6.1.0-9/kernel/net/nf-nat.ko.xz"),
        (0xFFFFFFFFA0010000, 0x1000, 0, "[ext4]"),
    ):
        event = f"swapper 0 [000] 0.0: PERF_RECORD_MMAP -1/0: [{at:#x}({size:#x}) @"
        script.line(f"{event} {reference:#x}]: x {name}".encode())
    kernel = 0xFFFFFFFF81000000
    assert script.kernel == {
        b"[kernel.kallsyms]": KernelMapping(kernel, kernel + 0x1209988, b"_text", kernel),
        b"[nf_nat]": KernelMapping(0xFFFFFFFFA0000000, 0xFFFFFFFFA0009000),
        b"[ext4]": KernelMapping(0xFFFFFFFFA0010000, 0xFFFFFFFFA0011000),
    }


def test_chain_has_offsets() -> None:
    text = (
        mmap(0x55000000, 0x1000, "/app/hot") + b"\n" + mmap(0x7F0000000000, 0, "/lib/x (deleted)")
    )
    kernel, leaf, caller, last = frames(text + b"\n" + CHAIN)
    assert (kernel[0].unknown, kernel[1]) == (
        False,
        ScriptLocation(b"[kernel.kallsyms]", None, kernel[0].ip),
    )
    assert leaf[1] == ScriptLocation(b"/app/hot", ID, 0x1040)
    # The kernel interrupted it: it is no return address. The others are.
    assert [frame.called for frame, _ in (kernel, leaf, caller, last)] == [False, False, True, True]
    assert (caller[0].unknown, caller[0].dso) == (False, b"/app/hot")
    # As perf printed before Linux 5.12.
    assert last[1] == ScriptLocation(b"/lib/x (deleted)", ID, 0x10)


def test_sample_on_one_line() -> None:
    line = b"a b 1  7  [001]  2.000001:   1000 cpu-clock:     55000040 [unknown] (/app/hot)"
    text = mmap(0x55000000, 0x1000, "/app/hot") + b"\n" + line
    ((frame, location),) = frames(text)
    assert location == ScriptLocation(b"/app/hot", ID, 0x1040)
    assert (frame.before + b"55000040", frame.chain) == (line[: line.index(b" [unk")], False)
    assert places(line) == [None]


def test_without_events_a_chain_still_has_offsets() -> None:
    assert places(CHAIN)[1] == ScriptLocation(b"/app/hot", None, 0x1040)


def test_offset_that_perf_prints_itself() -> None:
    text = mmap(0x55000000, 0x1000, "/app/hot") + b"\nhot 7/7 1.1: x:\n"
    text += b"\t    55000040 [unknown] (/app/hot+0x1040)\n\t  55000041 [unknown] (/b+0x2+0x3)\n"
    text += b"hot 7/7 1.1: x:   55000040 [unknown] (/app/hot+0x1040)\n"
    hot = ScriptLocation(b"/app/hot", ID, 0x1040)
    assert places(text) == [hot, ScriptLocation(b"/b+0x2", None, 3), hot]


def test_same_path_in_two_processes() -> None:
    text = b"\n".join(
        [
            mmap(0x1000000, 0, "/app/hot"),
            mmap(0x1000000, 0, "/app/hot", OTHER, pid=8),
            b"hot 7/7 1.1: x:  1000010 [unknown] (/app/hot)",
            b"hot 8/9 1.2: x:  1000010 [unknown] (/app/hot)",
        ]
    )
    assert [place.build_id for place in places(text) if place] == [ID, OTHER]


def test_threads_children_and_exec() -> None:
    text = b"\n".join(
        [
            mmap(0x1000000, 0, "/app/hot"),
            b"hot 7 1.1: PERF_RECORD_FORK(7:9):(7:7)",
            b"hot 9 1.2: x:  1000010 [unknown] (/app/hot)",  # a thread
            b"hot 7 1.3: PERF_RECORD_FORK(10:10):(7:7)",
            b"hot 10 1.4: x:  1000020 [unknown] (/app/hot)",  # a child
            b"new 10 1.5: PERF_RECORD_COMM exec: new:10/10",
            b"new 10 1.6: x:  1000030 [unknown] (/app/hot)",  # which is another program now
            b"hot 7 1.6: x:  1000040 [unknown] (/app/hot)",
            b"hot 7 1.7: PERF_RECORD_EXIT(7:7):(1:1)",
            b"hot 7 1.8: x:  1000050 [unknown] (/app/hot)",
        ]
    )
    assert [place and place.offset for place in places(text)] == [0x10, 0x20, None, 0x40, None]


def test_new_mapping_replaces_old() -> None:
    text = b"\n".join(
        [
            mmap(0x1000000, 0, "/old", size=0x3000),
            mmap(0x1001000, 0x5000, "/new", OTHER),
            b"hot 7 1.1: x:  1001010 [unknown] (/new)",
            b"hot 7 1.2: x:  1000010 [unknown] (/old)",
        ]
    )
    assert places(text) == [ScriptLocation(b"/new", OTHER, 0x5010), None]


@pytest.mark.parametrize(
    "line",
    [
        b"", b"\t", b"\t zz [unknown] (/a)", b"\t 12 [unknown] (/a", b"\t 12 inner (inlined)",
        b"hot 7 1.1: PERF_RECORD_MMAP2 7/7: [0x(0x) @ 0 0]: r-xp /a",
        b"hot 7 1.1: PERF_RECORD_FORK(7):(7)", b"no sample at all",
        mmap(0x1000, 0, "//anon"), mmap(0x1000, 0, "[heap]"),
    ],
)  # fmt: skip
def test_other_lines(line: bytes) -> None:
    assert not any(frame.unknown for frame, _ in frames(line))


def test_mapping_without_a_build_id() -> None:
    text = mmap(0x1000000, 0, "/a", None) + b"\nhot 7 1.1: x:  1000010 [unknown] (/a)"
    assert places(text) == [ScriptLocation(b"/a", None, 0x10)]


def test_many_processes_are_forgotten() -> None:
    script = Script()
    for pid in range(70_000):
        script.line(mmap(0x1000000, 0, "/a", pid=pid))
    sample = b"hot %d/%d 1.1: x:  1000010 [unknown] (/a)"
    assert frames(sample % (1, 1), script)[0][1] is None
    assert frames(sample % (69_999, 69_999), script)[0][1] == ScriptLocation(b"/a", ID, 0x10)


def test_build_ids() -> None:
    text = f"{ID} /usr/lib/a b\n{OTHER} [vdso]\nzz /c\n{ID} /two\n{OTHER} /two\n\n{ID}".encode()
    assert parse_build_ids(text) == {b"/usr/lib/a b": ID, b"[vdso]": OTHER}
