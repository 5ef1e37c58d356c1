# SPDX-License-Identifier: Apache-2.0
"""Who does not answer is asked once, and what comes too late is thrown away."""

from __future__ import annotations

import threading

import pytest

from buildidfs.capture.patience import Patience, slow_devices

DEVICE, OTHER = (0, 99), (0, 98)


def unwanted(answer: object) -> None:
    pytest.fail(f"{answer} was discarded")


def test_answer_is_passed_on() -> None:
    assert Patience(60).ask(DEVICE, lambda: 42, unwanted) == 42


def test_error_is_passed_on() -> None:
    def refuse() -> None:
        raise PermissionError(13, "no")

    with pytest.raises(PermissionError):
        Patience(60).ask(DEVICE, refuse, unwanted)


def test_silence_is_not_waited_for_twice() -> None:
    released, discarded = threading.Event(), threading.Event()
    asked = []

    def never() -> str:
        asked.append(True)
        released.wait(60)
        return "late"

    def discard(answer: str) -> None:
        assert answer == "late"
        discarded.set()

    patience = Patience(0.01)
    try:
        for _ in range(3):
            with pytest.raises(TimeoutError, match="does not answer"):
                patience.ask(DEVICE, never, discard)
        assert len(asked) == 1
        assert patience.ask(OTHER, lambda: "at once", unwanted) == "at once"
    finally:
        released.set()
    assert discarded.wait(60)


def test_which_filesystems_may_be_silent() -> None:
    line = b"36 35 0:%d / /mnt rw - %s source rw\n"
    types = [b"ext4", b"nfs4", b"fuse.sshfs", b"fuse.buildidfs", b"overlay", b"cifs", b"fuse"]
    text = b"".join(line % item for item in enumerate(types))
    assert slow_devices(text) == {(0, 1), (0, 2), (0, 5), (0, 6)}
