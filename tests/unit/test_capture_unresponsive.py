# SPDX-License-Identifier: Apache-2.0
"""Who does not answer is asked once, and what comes too late is thrown away."""

from __future__ import annotations

import os
import threading

import pytest

from buildidfs.capture.unresponsive import Devices, Patience, slow_devices

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


def test_what_may_not_answer_has_to_be_known_without_a_block_device() -> None:
    devices = Devices()
    by_user = (
        b"30 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        b"31 30 0:40 / /tmp rw - tmpfs none rw\n"
        b"32 30 0:41 / /m rw - overlay none rw,lowerdir=/gone\n"
    )
    assert devices.learn(by_user, overlays_answer=False)
    assert devices.may_not_answer((0, 41))
    assert devices.may_not_answer((0, 99))  # mounted nowhere any more
    assert not devices.may_not_answer((0, 40))
    assert not devices.may_not_answer((8, 2))
    fd = os.memfd_create("test")
    memory = os.fstat(fd).st_dev
    os.close(fd)
    assert not devices.may_not_answer((os.major(memory), os.minor(memory)))
    assert not devices.learn(by_user, overlays_answer=True)
    assert not devices.may_not_answer((0, 41))
    assert devices.learn(b"33 30 8:3 / /n rw - fuseblk /dev/sdb rw\n", overlays_answer=True)
    assert devices.may_not_answer((8, 3))
