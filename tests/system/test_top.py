# SPDX-License-Identifier: Apache-2.0
"""buildidfs top: a live view on a real terminal, and its values for scripts."""

from __future__ import annotations

import re
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from buildidfs.store import Store
from buildidfs.store.run_files import Presence
from tests.support.clients.commands import COMMAND
from tests.support.clients.terminals import terminal
from tests.support.clients.tools import tool
from tests.support.harness.captures import capture

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.harness.mounts import BuildIdFs

ODD = "docker:\N{SNOWMAN}\x1b]0;x\x07"
BEGIN, END = b"\x1b[?1049h", b"\x1b[?1049l"


def facts(captured: int) -> dict[str, Any]:
    """What a watch tells that follows everything, and has lost three files of a container."""
    now = time.time()
    return {
        "mode": "following", "degraded": [], "captured": captured, "held": 7, "waiting": 2,
        "waiting_bytes": 2048, "copied_bytes": 3 << 20, "lag": 1.5, "store_error": "",
        "told": time.monotonic(), "events_lost": 0, "records_lost": 0, "restarts": 0,
        "sources": [
            {"container": "", "captured": captured - 3, "bytes": 2 << 20, "last": now - 60},
            {"container": ODD, "captured": 3, "bytes": 1 << 20, "last": now - 3600},
        ],
        "losses": [
            {"container": ODD, "reason": "No such file", "count": 3, "recent": 0, "last": now},
        ],
    }  # fmt: skip


@pytest.fixture
def watch(buildidfs: BuildIdFs) -> Iterator[Presence]:
    """What a watch leaves for others to read."""
    with Store.create(buildidfs.store) as store:
        store.commit([capture(store, b"content")])
    with Presence(buildidfs.store, "watch", **facts(10)) as presence:
        yield presence


def words(buildidfs: BuildIdFs) -> tuple[object, ...]:
    return (*COMMAND, "--store", buildidfs.store, "top", "--interval", "0.2")


@pytest.mark.parametrize(("columns", "locale"), [(80, "C"), (200, "C.UTF-8")])
def test_live_view(buildidfs: BuildIdFs, watch: Presence, columns: int, locale: str) -> None:
    with terminal(*words(buildidfs), columns=columns, env={"LC_ALL": locale}) as running:
        running.read_until(b"q ends")
        watch.update(**facts(510))
        running.read_until(b"510 files")
        running.read_more(b"q ends", 2)
        running.type(b"q")
        shown = running.end()
    assert shown.rc == 0
    assert shown.raw.endswith(END)
    assert b"\x1b]0" not in shown.raw
    frames = shown.raw.decode().split("\x1b[H")
    text = next(frame for frame in reversed(frames) if "q ends" in frame)
    text = re.sub(r"\x1b\[[\d;]*m", "", text)
    assert max(len(line.partition("\x1b")[0]) for line in text.split("\r\n")) <= columns
    assert shown.raw.isascii() == (locale == "C")
    for each in ("healthy", "following", "lag 1.5 s", "CONTAINER", "the host", "LOST", "1 min ago"):
        assert each in text, each
    assert "a second; 7 already held" in text
    assert ("IN 10 MIN" in text) == (columns >= 100)
    row = next(line for line in text.split("\r\n") if line.startswith("the host"))
    captured, rate = row.split()[2:4]
    assert captured == "507"
    assert float(rate) > 0


def test_finding_is_whole_on_a_narrow_terminal(buildidfs: BuildIdFs, watch: Presence) -> None:
    reason = "the kernel refuses one kind of event after another, so that few files are seen"
    watch.update(**{**facts(10), "degraded": [f"{reason}, and the remedy stands at the very end"]})
    with terminal(*words(buildidfs), columns=80) as running:
        running.read_until(b"q ends")
        running.type(b"q")
        shown = running.end()
    text = " ".join(re.sub(r"\x1b\[[\d;]*[A-Za-z]", "", shown.raw.decode()).split())
    assert reason in text
    assert "the remedy stands at the very end" in text


@pytest.mark.parametrize("end", ["ctrl-c", "term"])
def test_terminal_is_as_before_however_it_ends(
    buildidfs: BuildIdFs, watch: Presence, end: str
) -> None:
    with terminal(*words(buildidfs)) as running:
        running.read_until(b"q ends")
        assert BEGIN in running.raw
        if end == "ctrl-c":
            running.type(b"\x03")
        else:
            running.process.send_signal(signal.SIGTERM)
        shown = running.end()
    assert (shown.rc, shown.raw.endswith(END)) == (0, True)
    assert b"Traceback" not in shown.raw


def test_once_in_the_background(buildidfs: BuildIdFs, watch: Presence) -> None:
    """timeout(1) puts its program into a process group that the terminal does not belong to."""
    shell = (tool("sh"), "-c", '"$@"; exit', "sh", tool("timeout"), "--kill-after=1", "10")
    with terminal(*shell, *words(buildidfs)) as running:
        shown = running.end()
    assert shown.rc == 0
    assert b"10 files" in shown.raw
    assert BEGIN not in shown.raw


def test_once_in_a_pipe(buildidfs: BuildIdFs, watch: Presence) -> None:
    lines = [line.split("\t") for line in buildidfs("top").out.splitlines()]
    head = {line[0]: line[1] for line in lines if len(line) == 2}
    assert head["state"].startswith("healthy, following, at ")
    assert head["captured"] == "10 files, 3.0 MiB; 7 already held", "one look has no rate"
    assert head["waiting"] == "2 files, 2.0 KiB; lag 1.5 s"
    assert head["lost"].startswith("3 files, 0 in the last 10 minutes; 0 events")
    assert head["store"].startswith("1 build ID, ")
    rows = [line for line in lines if len(line) == 7]
    assert [(row[0], *row[1:4], row[5]) for row in rows] == [
        ("the host", "7", "-", str(2 << 20), "0"),
        ("docker:\N{SNOWMAN}\\x1b]0;x\\x07", "3", "-", str(1 << 20), "3"),
    ]
    (row,) = buildidfs("top", "--once", "--sort", "-lost", "--limit", "1").out.splitlines()[-1:]
    assert row.split("\t")[5] == "3"


def test_mode_has_the_words_of_status(buildidfs: BuildIdFs, watch: Presence) -> None:
    watch.update(**{**facts(10), "mode": "confined"})
    (state,) = [line for line in buildidfs("top").out.splitlines() if line.startswith("state\t")]
    assert ", following this PID namespace only, at " in state


def test_nothing_runs(buildidfs: BuildIdFs) -> None:
    Store.create(buildidfs.store).close()
    lines = buildidfs("top").out.splitlines()
    assert lines[0].startswith("state\tdown, at ")
    assert lines[1] == "down\tnothing runs -> buildidfs up starts it"
