# SPDX-License-Identifier: Apache-2.0
"""Timers that one thread waits for and others set."""

from __future__ import annotations

import select
import threading
import time

from buildidfs.linux.alarm import Alarm


def test_wait_ends_after_the_first_of_several_calls() -> None:
    with Alarm(0.1) as alarm:
        assert not select.select([alarm], [], [], 0.15)[0], "not set"
        began = time.monotonic()
        for _ in range(10):
            alarm.set()
            time.sleep(0.005)
        alarm.wait()
        assert 0.1 <= time.monotonic() - began < 5
        assert not select.select([alarm], [], [], 0.15)[0], "not set since"
        alarm.set()
        alarm.wait()


def test_change_before_a_call_is_seen_after_a_wait() -> None:
    """However the call falls between the steps of the waiting thread."""
    changes, seen = 0, 0
    with Alarm(0.0001) as alarm:

        def work() -> None:
            nonlocal seen
            while seen < 2000:
                alarm.wait()
                seen = changes

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        while changes < 2000:
            changes += 1
            alarm.set()
        thread.join(20)
        assert seen == 2000
