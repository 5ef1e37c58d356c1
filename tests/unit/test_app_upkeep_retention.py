# SPDX-License-Identifier: Apache-2.0
"""Settings become a retention policy, and files a list of build IDs to pin."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from buildidfs.app import build_ids_in, pins
from buildidfs.app.upkeep import daily, retention
from buildidfs.config import RetentionSettings
from buildidfs.errors import AmbiguousBuildId, InvalidBuildId, StoreFull, UsageError
from buildidfs.model import BuildId, Kind
from buildidfs.store.retention.policy import Policy
from tests.support.captures import SECOND, capture, sighting
from tests.support.clients import run, tool
from tests.support.waiting import until

if TYPE_CHECKING:
    from buildidfs.store import Store
    from buildidfs.store.retention.removal import Removed

GIB = 1 << 30


# --- settings ------------------------------------------------------------------------------------


def test_without_settings_a_little_stays_free(tmp_path: Path) -> None:
    usage = os.statvfs(tmp_path)
    total = usage.f_blocks * usage.f_frsize
    policy = retention.policy(RetentionSettings(), tmp_path)
    assert policy == Policy(keep_free=min(total // 20, 4 * GIB), yields=False)


def test_shares_are_of_the_filesystem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = os.statvfs_result((4096, 4096, 1000, 20, 10, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: usage)
    settings = RetentionSettings(keep_free="5%", max_size="80%")
    policy = retention.policy(settings, tmp_path)
    assert policy == Policy(max_size=800 * 4096, keep_free=50 * 4096)


def test_all_settings(tmp_path: Path) -> None:
    settings = RetentionSettings(max_size="50G", keep_free=0, max_age="30d", min_age="12h")
    assert retention.policy(settings, tmp_path) == Policy(
        max_size=50 * GIB, keep_free=0, max_age=30 * 86_400, min_age=12 * 3600
    )


# --- upkeep --------------------------------------------------------------------------------------


def test_upkeep_enforces_and_collects(store: Store) -> None:
    old = sighting(seen_ns=time.time_ns() - 40 * 86_400 * SECOND)
    store.commit([capture(store, b"old", at=old)])
    store.retain(Policy(max_age=30 * 86_400))
    collected: list[bool] = []
    store.collect = lambda: collected.append(True)  # type: ignore[method-assign, assignment, func-returns-value]
    with daily.Upkeep(store, every_s=0.01):
        until(lambda: store.stats().blobs == 0, "the old blob to go")
        until(lambda: collected, "what is left to be collected")
    assert len(collected) == 1, "once a day"


@pytest.mark.parametrize("error", [StoreFull("the disk is full"), KeyError("a fault")])
def test_upkeep_goes_on_after_a_failure(
    store: Store, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[bool] = []

    def enforce() -> Removed:
        calls.append(True)
        raise error

    store.enforce = enforce  # type: ignore[method-assign]
    with daily.Upkeep(store, every_s=0.01):
        until(lambda: len(calls) > 2, "more attempts")
    assert "cannot look after the store" in caplog.text


# --- pins ----------------------------------------------------------------------------------------


def test_build_ids_may_be_unknown_in_full_only(store: Store) -> None:
    known = BuildId(bytes.fromhex("abcdef0123"))
    store.commit([capture(store, b"x", known), capture(store, b"y", bytes.fromhex("abcdef99"))])
    assert pins.build_id(store, "abcdef01") == known
    unknown = "AB" * 20
    assert pins.build_id(store, unknown) == BuildId.from_hex(unknown)
    with pytest.raises(AmbiguousBuildId):
        pins.build_id(store, "abcd")
    with pytest.raises(InvalidBuildId, match="has to be given in full"):
        pins.build_id(store, "1234")
    with pytest.raises(InvalidBuildId):
        pins.build_id(store, "1" * 41)


def test_a_core_file_names_what_was_mapped(store: Store, tmp_path: Path) -> None:
    build_id = os.urandom(20)
    source, program, core = (tmp_path / name for name in ("a.c", "a", "core"))
    source.write_text('#include <unistd.h>\nint main(void) { write(1, "", 1); pause(); }\n')
    run([tool("gcc"), f"-Wl,--build-id=0x{build_id.hex()}", "-o", program, source], check=True)
    run(
        [tool("gdb"), "-nx", "-batch", "-ex", "break pause", "-ex", "run > /dev/null",
         "-ex", f"generate-core-file {core}", "-ex", "kill", program],
        check=True,
    )  # fmt: skip
    found = build_ids_in.build_ids_named(store, os.fsencode(core))
    assert found.paths[BuildId(build_id)] == os.fsencode(program)
    assert len(found.paths) > 1
    assert (found.nameless, found.incomplete) == ([], "")


def test_what_names_no_build_id(store: Store, tmp_path: Path) -> None:
    head = b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x04\0"  # a core file that was cut off
    core = tmp_path / "empty.core"
    core.write_bytes(head + bytes(100))
    found = build_ids_in.build_ids_named(store, os.fsencode(core))
    assert (found.paths, found.nameless) == ({}, [])
    (tmp_path / "text").write_text("text")
    for path, message in (
        (tmp_path / "missing", "cannot read .*/missing: No such file"),
        (tmp_path / "text", "neither a profile of perf, nor a core file, nor a binary"),
        (tmp_path, str(tmp_path)),
    ):
        with pytest.raises(UsageError, match=message):
            build_ids_in.build_ids_named(store, os.fsencode(path))


def test_the_dwz_file_that_debuginfo_needs(store: Store) -> None:
    from tests.support.elfwriter import Section, elf_file

    needed = BuildId(b"\xdd" * 20)
    link = Section(b".gnu_debugaltlink", b"/usr/lib/debug/.dwz/common.debug\0" + needed)
    data = elf_file([link], build_id=b"\xaa" * 20)
    store.commit([capture(store, data, b"\xaa" * 20, kinds=[Kind.DEBUGINFO])])
    store.commit([capture(store, b"no ELF file", b"\xbb" * 20)])
    altlink = retention.altlinks(store)
    digests = [
        store.index.variants(1, Kind.DEBUGINFO)[0].digest,
        store.index.variants(2, 1)[0].digest,
    ]
    assert [altlink(digest) for digest in digests] == [needed, None]
    os.unlink(store.blobs.path(digests[0]))
    assert retention.altlinks(store)(digests[0]) is None
