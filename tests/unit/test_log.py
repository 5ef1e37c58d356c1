# SPDX-License-Identifier: Apache-2.0
"""Lines of the log: their forms, and those of the programs that a process starts."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from logging.handlers import QueueHandler
from queue import SimpleQueue

import pytest

from buildidfs import log
from buildidfs.model import BuildId

SPEAK = """
import logging, sys, threading
from buildidfs import log
from buildidfs.linux import child
log.setup(int(sys.argv[1]), form=sys.argv[2])
log.rename("speaker")
speaker = logging.getLogger("buildidfs.watch.daemon")
speaker.debug("%s: pinned", b"/bin/a\\nb")
speaker.warning("one %d", 1)
child.start(child.module_command("tests.unit.test_log"), cwd=".").wait(20)
for line in sys.argv[3:]:
    log.relay(log.parsed(line))
if log.is_json():
    log.report("warning: it is so")
    threading.Thread(target=lambda: 1 / 0, name="buildidfs-bad").start()
"""


def main(words: list[str]) -> None:
    """The program that `SPEAK` starts."""
    logging.getLogger("buildidfs.child").debug("a debug line of the child")
    logging.getLogger("buildidfs.child").warning("a warning of the child")


def spoken(verbosity: int, form: str = "text", *relayed: str) -> list[str]:
    command = [sys.executable, "-c", SPEAK, str(verbosity), form, *relayed]
    done = subprocess.run(command, check=True, stderr=subprocess.PIPE, text=True)
    return done.stderr.splitlines()


def test_default_level_shows_warnings_without_details() -> None:
    assert spoken(0) == ["buildidfs: warning: one 1", "a warning of the child"]


def test_everything_shows_time_process_and_thread_also_of_child_processes() -> None:
    lines = spoken(2)
    parts = [line.split(" ", 5) for line in lines]
    assert [each[1] for each in parts] == ["debug", "warning", "debug", "warning"]
    assert [each[2].partition("[")[0] for each in parts] == ["speaker"] * 2 + ["test_log"] * 2
    assert {each[3] for each in parts} == {"MainThread"}
    assert parts[0][4:] == ["watch.daemon:", "/bin/a\\nb: pinned"]
    assert parts[2][5] == "a debug line of the child"


def test_each_line_of_json_is_an_object() -> None:
    rows = [json.loads(line) for line in spoken(2, "json")]
    assert rows[0]["message"] == "/bin/a\\nb: pinned"
    assert rows[0] | {"level": "debug", "process": "speaker", "module": "watch.daemon"} == rows[0]
    assert [each["process"] for each in rows[2:4]] == ["test_log"] * 2
    assert (rows[4]["level"], rows[4]["message"]) == ("warning", "it is so")
    assert (rows[5]["thread"], "ZeroDivisionError" in rows[5]["traceback"]) == ("bad", True)


@pytest.mark.parametrize("form", ["text", "json"])
def test_supervisor_recognises_complete_lines(form: str) -> None:
    for line in spoken(2, form)[:2]:
        found = log.parsed(line)
        assert found.complete == line
        assert found.message in ("/bin/a\\nb: pinned", "one 1")


@pytest.mark.parametrize("form", ["text", "json"])
def test_complete_lines_are_relayed_as_they_are(form: str) -> None:
    line = spoken(2, form)[0]
    assert line in spoken(2, form, line)


def test_short_lines_have_level_and_message() -> None:
    assert log.parsed("<4>buildidfs: warning: so") == (logging.WARNING, "so", "")
    assert log.parsed("buildidfs: so") == (logging.INFO, "so", "")
    assert log.parsed("{not json") == (logging.INFO, "{not json", "")


def test_build_ids_are_written_as_hex() -> None:
    record = logging.LogRecord("buildidfs", 10, "", 0, "%s", (BuildId(b"\1\2"),), None)
    assert log._message(record) == "0102"


def test_threads_do_not_wait_for_the_stream() -> None:
    written: SimpleQueue[logging.LogRecord] = SimpleQueue()
    handler = log.BackgroundHandler([QueueHandler(written)])
    for number in range(3):
        handler.handle(logging.LogRecord("buildidfs", 10, "", 0, "%d", (number,), None))
    handler.finish(5.0)
    assert [written.get_nowait().message for _ in range(3)] == ["0", "1", "2"]


def test_message_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("buildidfs.test_log")
    for text in ("disk of 100% lost", "disk of 100% lost", "another"):
        log.log_once(logger, logging.WARNING, text)
    assert [record.getMessage() for record in caplog.records] == ["disk of 100% lost", "another"]


def test_message_rate_is_for_each_key_and_ends_with_its_time() -> None:
    rate = log.MessageRate(0.05)
    assert [rate.take(key) for key in "aabba"] == [True, False, True, False, False]
    time.sleep(0.06)
    assert rate.take("a")


def test_message_rate_keeps_a_bounded_number_of_keys() -> None:
    rate = log.MessageRate(most=2)
    assert all(map(rate.take, "0123"))
    assert not rate.take("3")
    assert rate.take("0")
