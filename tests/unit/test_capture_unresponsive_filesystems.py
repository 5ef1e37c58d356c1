# SPDX-License-Identifier: Apache-2.0
"""The filesystems that may not answer, also while one does not."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from buildidfs.capture.unresponsive.filesystems import (
    Devices,
    Patience,
    Silences,
    SlowMounts,
    is_slow_type,
)
from buildidfs.linux import inodes, mounts, namespaces, procfs
from tests.support.filesystems.silentfs import served
from tests.support.harness.captures import identity
from tests.support.harness.children import cat_program, needs_root, private_cat
from tests.support.harness.scans import open_descriptors
from tests.support.harness.waiting import until


def is_slow(path: str | bytes | Path, mnt_ns_id: int = 0, slow: SlowMounts | None = None) -> bool:
    fd = os.open(path, os.O_PATH)
    try:
        mounts = SlowMounts() if slow is None else slow
        return mounts.is_slow(fd, inodes.identity(fd, ask=False), mnt_ns_id)
    finally:
        os.close(fd)


@pytest.fixture
def statmount() -> None:
    try:
        mounts.mount_magic((1 << 63) - 1)
    except FileNotFoundError:
        return
    except OSError as error:
        pytest.skip(f"this kernel has no statmount: {error.strerror}")


@pytest.mark.usefixtures("statmount")
@pytest.mark.parametrize("path", [cat_program(), "/proc/self/maps", "/dev", "/sys"])
def test_filesystems_of_the_kernel_answer(path: str | Path) -> None:
    assert not is_slow(path)


@pytest.mark.usefixtures("statmount")
def test_memory_is_not_asked_for_its_mount_which_is_nowhere() -> None:
    fd = os.memfd_create("code")
    try:
        assert not is_slow(f"/proc/self/fd/{fd}")
        with pytest.raises(OSError, match="No such file"):
            mounts.mount_magic(inodes.unique_mount_id(fd) or 0)
    finally:
        os.close(fd)


@pytest.mark.usefixtures("statmount")
@pytest.mark.fuse
@pytest.mark.root
@needs_root("stops a server")
def test_a_server_that_is_silent(tmp_path: Path) -> None:
    with served(tmp_path, cat_program()) as server:
        fd = os.open(tmp_path / "app", os.O_PATH)
        server.send_signal(signal.SIGSTOP)
        try:
            shown = inodes.identity(fd, ask=False)
            assert SlowMounts().is_slow(fd, shown, 0)
            # As of FUSE on a block device, which has a number of its own.
            on_disk = identity(dev=0x801, scope=b"", ino=shown.ino)
            assert SlowMounts().is_slow(fd, on_disk, 0)
        finally:
            server.send_signal(signal.SIGCONT)
            os.close(fd)


@pytest.mark.usefixtures("statmount")
@pytest.mark.root
@needs_root("mounts in a namespace of its own")
def test_another_namespace_has_to_be_known(tmp_path: Path) -> None:
    with private_cat(tmp_path) as child:
        pid_fd = procfs.open_pid(child.pid)
        try:
            number = namespaces.mnt_ns_id(pid_fd)
        finally:
            os.close(pid_fd)
        path = f"/proc/{child.pid}/exe"
        mounts = SlowMounts()
        assert is_slow(path, slow=mounts)  # not one of ours: it is not known
        assert not is_slow(path, number, slow=mounts)
        assert not is_slow(path, slow=mounts)  # known by now


@pytest.mark.usefixtures("statmount")
def test_on_a_disk_it_has_to_be_known_to_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_descriptors()
    fd = os.open(cat_program(), os.O_PATH)
    try:
        nobody_knows = (1 << 63) - 1
        assert not SlowMounts().is_slow(fd, identity(scope=b""), nobody_knows)
        assert SlowMounts().is_slow(fd, identity(dev=0x30, scope=b"s" * 24), nobody_knows)
    finally:
        os.close(fd)
    assert open_descriptors() <= before


@pytest.mark.usefixtures("statmount")
def test_a_closed_descriptor() -> None:
    fd = os.open("/", os.O_PATH)
    os.close(fd)
    assert SlowMounts().is_slow(fd, identity(dev=0x30, scope=b"s" * 24), 0)
    assert not SlowMounts().is_slow(fd, identity(scope=b""), 0)


@pytest.mark.usefixtures("statmount")
def test_overlay_that_only_root_can_have_mounted_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mounts, "mount_magic", lambda mount, namespace: 0x794C7630)
    slow, initial = SlowMounts(), namespaces.initial().user
    fd = os.open(cat_program(), os.O_PATH)
    try:
        assert slow.is_slow(fd, identity(), 1, initial + 1)
        assert slow.is_slow(fd, identity(), 1)
        assert not slow.is_slow(fd, identity(), 1, initial)
    finally:
        os.close(fd)


def test_which_filesystems_may_be_silent() -> None:
    types = [b"ext4", b"nfs4", b"fuse.sshfs", b"fuse.buildidfs", b"overlay", b"cifs", b"fuse"]
    assert [is_slow_type(each) for each in types] == [0, 1, 1, 0, 0, 1, 1]


def test_unknown_device_without_a_block_device_may_not_answer() -> None:
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


def test_silence_ends_after_its_time() -> None:
    silences = Silences(seconds=0.0)
    silences.add(DEVICE)
    assert not silences.has(DEVICE)
    silences = Silences(seconds=60.0)
    silences.add(DEVICE)
    assert silences.has(DEVICE)
    assert not silences.has(OTHER)


def test_abandoned_question_about_a_file_keeps_no_descriptor() -> None:
    released = threading.Event()
    patience = Patience(0.01)
    with open(os.devnull, "rb") as file:
        before = open_descriptors()
        for _ in range(3):  # after the first time the filesystem is not asked
            with pytest.raises(TimeoutError):
                patience.ask_about(DEVICE, file.fileno(), lambda fd: released.wait(60))
        assert open_descriptors() == before + 1, "that of the thread that waits"
        released.set()
        until(lambda: open_descriptors() == before, "the thread to close its descriptor")
