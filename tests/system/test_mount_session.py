# SPDX-License-Identifier: Apache-2.0
"""Mounting and unmounting: how it begins, how it ends, and why it is refused."""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from buildidfs.errors import MountError
from buildidfs.linux import machine
from buildidfs.linux.sdnotify import Inbox
from buildidfs.mount import mountpoint
from buildidfs.store import Store, coordination
from buildidfs.store.run_files import present
from tests.support.clients.tools import run, tool, unmount
from tests.support.harness.captures import capture
from tests.support.harness.mounts import is_mountpoint
from tests.support.harness.restricted import as_nobody
from tests.support.harness.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.support.harness.mounts import BuildIdFs

pytestmark = pytest.mark.fuse

ID = bytes.fromhex("abcdef0123")
HEX = "abcdef0123"
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def place(buildidfs: BuildIdFs) -> Iterator[Path]:
    """A mount point beside a store with one file in it; whatever is left there is taken away."""
    with Store.create(buildidfs.store) as store:
        store.commit([capture(store, b"bytes", ID)])
    buildidfs.mountpoint.mkdir()
    yield buildidfs.mountpoint
    while is_mountpoint(buildidfs.mountpoint):
        run([tool("umount"), "-l", buildidfs.mountpoint], check=True)


@contextlib.contextmanager
def _serving(
    buildidfs: BuildIdFs, *words: str, script: str = "", place: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A mount process in the foreground, killed at the end if it is still there.

    ``script`` is Python that runs first, to give the program a fault.
    """
    main = "import sys; from buildidfs.cli.main import main; sys.exit(main())"
    where = place or buildidfs.mountpoint
    argv = [sys.executable, "-c", f"{script}\n{main}", "--store", str(buildidfs.store),
            "mount", "--foreground", *words, str(where)]  # fmt: skip
    log = (buildidfs.store.parent / "server.log").open("wb")
    with log, subprocess.Popen(argv, cwd=REPOSITORY, stdout=log, stderr=log) as server:
        try:
            until(
                lambda: server.poll() is not None or _is_open(where),
                "an answer from the mount",
            )
            yield server
        finally:
            server.kill()


def _is_open(where: Path) -> bool:
    """Whether files can be opened; names alone the kernel may know from a server before."""
    try:
        os.close(os.open(where / HEX / "path", os.O_RDONLY))
    except OSError:
        return False
    return True


def _log(buildidfs: BuildIdFs) -> str:
    return (buildidfs.store.parent / "server.log").read_text()


def _refusal(buildidfs: BuildIdFs, *words: str | Path) -> str:
    """The one line that `mount` says when it fails, after making sure that it is one."""
    result = buildidfs("mount", *words, check=False)
    assert result.rc == 40, str(result)
    assert not result.out
    assert result.err.count("\n") == 1, result.err
    assert "Traceback" not in result.err
    return result.err


# --- how it ends ---------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("loop", ["fast", "plain"])
def test_a_signal_unmounts(
    buildidfs: BuildIdFs, place: Path, number: signal.Signals, loop: str
) -> None:
    with _serving(buildidfs, "-o", f"loop={loop}") as server:
        assert (place / HEX / "elf").read_bytes() == b"bytes"
        server.send_signal(number)
        assert server.wait(20) == 0
    assert not is_mountpoint(place)
    assert _log(buildidfs) == ""


@pytest.mark.parametrize("loop", ["fast", "plain"])
def test_a_signal_while_a_file_is_open(buildidfs: BuildIdFs, place: Path, loop: str) -> None:
    with _serving(buildidfs, "-o", f"loop={loop}") as server:
        fd = os.open(place / HEX / "path", os.O_RDONLY)
        try:
            server.send_signal(signal.SIGTERM)
            assert server.wait(20) == 0
            assert not is_mountpoint(place)
            assert os.listdir(place) == []
            with pytest.raises(OSError, match=r".") as caught:
                os.pread(fd, 1, 0)
            assert caught.value.errno == errno.ENOTCONN
        finally:
            with contextlib.suppress(OSError):
                os.close(fd)


@pytest.mark.parametrize("loop", ["fast", "plain"])
def test_unmounting_from_outside(buildidfs: BuildIdFs, place: Path, loop: str) -> None:
    with _serving(buildidfs, "-o", f"loop={loop}") as server:
        unmount(place)
        assert server.wait(20) == 0
    with _serving(buildidfs, "-o", f"loop={loop}") as server:
        buildidfs("unmount", place)
        assert server.wait(20) == 0
    assert not is_mountpoint(place)


@pytest.mark.parametrize("foreground", [True, False])
def test_a_mount_is_present_while_it_answers(
    buildidfs: BuildIdFs, place: Path, foreground: bool
) -> None:
    def mounts() -> list[bytes]:
        return [each.path("mountpoint") for each in present(buildidfs.store, "mount")]

    assert mounts() == []
    with contextlib.ExitStack() as stack:
        if foreground:
            stack.enter_context(_serving(buildidfs))
            until(mounts, "the mount among those present")
        else:
            buildidfs("mount", place)
        assert mounts() == [os.fsencode(place)]
        buildidfs("unmount", place)
        # A namespace of another test may have a copy of the mount, which then goes on.
        until(lambda: mounts() == [], "the end of the mount")


def test_unmount_waits_for_the_end_of_the_process(buildidfs: BuildIdFs, place: Path) -> None:
    """Until then it writes to the store, which a user may be about to remove."""
    slow_end = "import atexit, time; atexit.register(time.sleep, 0.5)"
    with _serving(buildidfs, script=slow_end) as server:
        assert (place / HEX / "elf").read_bytes() == b"bytes"
        buildidfs("unmount", place)
        assert server.poll() == 0
        assert list((buildidfs.store / "run").glob("uses-*"))


def test_unmount_does_not_wait_for_a_stopped_process(buildidfs: BuildIdFs, place: Path) -> None:
    with _serving(buildidfs) as server:
        os.kill(server.pid, signal.SIGSTOP)
        buildidfs("unmount", place)
        assert server.poll() is None
        os.kill(server.pid, signal.SIGCONT)
        assert server.wait(20) == 0


def test_a_service_manager_is_told_when_it_answers(
    buildidfs: BuildIdFs, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inbox = Inbox()
    monkeypatch.setenv("NOTIFY_SOCKET", inbox.name)
    with contextlib.closing(inbox), _serving(buildidfs):
        told = until(inbox.receive, "the message")
        assert told["READY"] == "1"
        assert (place / HEX / "elf").read_bytes() == b"bytes"


def test_unmounting_while_a_file_is_open(buildidfs: BuildIdFs, place: Path) -> None:
    with _serving(buildidfs) as server:
        with open(place / HEX / "elf", "rb") as file:
            buildidfs("unmount", place)
            assert not is_mountpoint(place)
            assert file.read() == b"bytes", "it goes on for those who have something open"
            assert server.poll() is None
        assert server.wait(20) == 0


@pytest.mark.root
def test_a_connection_that_is_aborted(buildidfs: BuildIdFs, place: Path) -> None:
    control = place.parent / "connections"
    control.mkdir()
    run([tool("mount"), "-t", "fusectl", "none", control], check=True)
    try:
        with _serving(buildidfs) as server:
            (control / str(os.minor(os.stat(place).st_dev)) / "abort").write_text("1")
            assert server.wait(20) == 0
    finally:
        unmount(control)
    buildidfs("mount", place)
    assert (place / HEX / "elf").read_bytes() == b"bytes"
    buildidfs("unmount", place)


# --- faults --------------------------------------------------------------------------------------

_FAULTY = """
from buildidfs.view import View
real = {name: getattr(View, name) for name in ("lookup", "children", "open_now", "attributes")}
def lookup(self, node, name):
    if name == b"fault-in-lookup":
        raise KeyError(name)
    if name in (b"fault-in-readdir", b"fault-in-open", b"fault-in-getattr", b"fault-in-readlink"):
        return {b"fault-in-readdir": 11, b"fault-in-open": 1 << 60 | 99 << 28 | 1 << 22,
                b"fault-in-getattr": 12, b"fault-in-readlink": 13}[name]
    return real["lookup"](self, node, name)
def children(self, node, after=0, viewer=None):
    if node == 11:
        raise KeyError(node)
    return real["children"](self, node, after, reader)
def attributes(self, node):
    if node == 1 << 60 | 99 << 28 | 1 << 22:
        from buildidfs.view import Attributes
        return Attributes(0o100444, 10, 0, 0, 0)
    if node == 12:
        raise KeyError(node)
    return real["attributes"](self, node)
def open_now(self, node):
    if node == 1 << 60 | 99 << 28 | 1 << 22:
        raise KeyError(node)
    return real["open_now"](self, node)
View.lookup, View.children, View.attributes = lookup, children, attributes
View.open_now = open_now
from buildidfs.mount import operations
def read_cached(self, fd, offset, size):
    raise KeyError("fault in read")
if "{where}" == "read":
    operations.Operations._read_cached = read_cached
"""


@pytest.mark.parametrize("loop", ["fast", "plain"])
def test_a_fault_in_a_handler_ends_nothing(buildidfs: BuildIdFs, place: Path, loop: str) -> None:
    """What is not an errno would end pyfuse3's main loop, and the mount for everybody."""
    script = _FAULTY.replace("{where}", "names")
    with _serving(buildidfs, "-o", f"loop={loop}", script=script) as server:
        for attempt in (
            lambda: os.stat(place / "fault-in-lookup"),
            lambda: os.stat(place / "fault-in-getattr"),
            lambda: os.listdir(place / "fault-in-readdir"),
            lambda: os.open(place / "fault-in-open", os.O_RDONLY),
        ):
            for _ in range(3):
                with pytest.raises(OSError, match=r".") as caught:
                    attempt()
                assert caught.value.errno == errno.EIO
        assert server.poll() is None
        assert (place / HEX / "elf").read_bytes() == b"bytes"
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0
    log = _log(buildidfs)
    assert log.count("fault of this program") == 12
    assert "KeyError" in log


@pytest.mark.parametrize("loop", ["fast", "plain"])
def test_a_fault_while_reading_ends_nothing(buildidfs: BuildIdFs, place: Path, loop: str) -> None:
    script = _FAULTY.replace("{where}", "read")
    with _serving(buildidfs, "-o", f"loop={loop}", script=script) as server:
        with pytest.raises(OSError, match=r".") as caught:
            (place / HEX / "elf").read_bytes()
        assert caught.value.errno == errno.EIO
        assert (place / HEX / "path").read_bytes() == b"/usr/bin/app\n"
        assert server.poll() is None
    assert "fault in read" in _log(buildidfs)


def test_a_lost_blob_is_not_there(buildidfs: BuildIdFs, place: Path) -> None:
    with Store.open(buildidfs.store) as store:
        artifact = store.index.artifact(1, 1)
        assert artifact
        os.unlink(store.blobs.path(artifact.digest))
    with _serving(buildidfs) as server:
        with pytest.raises(OSError, match=r".") as caught:
            (place / HEX / "elf").read_bytes()
        assert caught.value.errno in (errno.ENOENT, errno.ESTALE)
        assert (place / HEX / "path").exists()
        assert server.poll() is None
    assert "is missing" in _log(buildidfs)


# --- what not every machine has ------------------------------------------------------------------

_OLD_KERNEL = """
from buildidfs.mount import invalidate, operations
invalidate._INC_EPOCH = b"no such notification"
operations._PROBE_AT = 1
"""


def test_an_older_kernel(
    buildidfs: BuildIdFs, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before 6.16 there is no way to tell it that all names may have changed."""
    ids = [bytes([7, number]) for number in range(100)]
    with Store.open(buildidfs.store) as store, _serving(buildidfs, script=_OLD_KERNEL):
        names = [place / build_id.hex() / "elf" for build_id in ids]
        assert not any(name.exists() for name in names)
        monkeypatch.setattr(coordination, "_MOST_ORDINALS", 0)
        store.commit([capture(store, build_id, build_id) for build_id in ids])
        assert all(name.exists() for name in names)
        assert len(os.listdir(place)) == 113
        assert [name.read_bytes() for name in names] == ids


@pytest.mark.root
def test_a_store_that_cannot_be_written(buildidfs: BuildIdFs, place: Path) -> None:
    """Then there is nobody to hear of, either."""
    store = buildidfs.store
    run([tool("mount"), "--bind", store, store], check=True)
    run([tool("mount"), "-o", "remount,bind,ro", store], check=True)
    try:
        with _serving(buildidfs) as server:
            assert (place / HEX / "elf").read_bytes() == b"bytes"
            server.send_signal(signal.SIGTERM)
            assert server.wait(20) == 0
    finally:
        unmount(store)


@pytest.mark.root
def test_a_store_whose_filesystem_cannot_tell_what_is_in_memory(
    buildidfs: BuildIdFs, place: Path
) -> None:
    """tmpfs and overlayfs refuse reads that may not wait, or did; such reads go to a thread."""
    store = place.parent / "elsewhere"
    store.mkdir()
    run([tool("mount"), "-t", "tmpfs", "none", store], check=True)
    try:
        content = bytes(range(256)) * 5000
        with Store.create(store / "store") as made:
            made.commit([capture(made, content, ID)])
        buildidfs.store = store / "store"
        with _serving(buildidfs) as server:
            assert (place / HEX / "elf").read_bytes() == content
            server.send_signal(signal.SIGTERM)
            assert server.wait(20) == 0
    finally:
        run([tool("umount"), "-l", store], check=True)


# --- how it begins -------------------------------------------------------------------------------


def test_the_background(buildidfs: BuildIdFs, place: Path) -> None:
    """When the command returns, files can be read, and nothing of it is left in the way."""
    result = buildidfs("mount", place)
    assert (result.out, result.err) == ("", "")
    assert (place / HEX / "elf").read_bytes() == b"bytes"
    (server,) = _servers(place)
    assert os.getsid(server) != os.getsid(0)
    assert os.readlink(f"/proc/{server}/cwd") == "/"
    assert {os.readlink(f"/proc/{server}/fd/{n}") for n in (0, 1, 2)} == {"/dev/null"}
    buildidfs("unmount", place)
    until(lambda: not _servers(place), "the end of the mount process")


def _servers(place: Path) -> list[int]:
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
            if os.fsencode(place) in words and b"mount" in words:
                found.append(int(name))
    return found


def test_messages_of_the_background_in_a_file(buildidfs: BuildIdFs, place: Path) -> None:
    log = buildidfs.store.parent / "mount.log"
    with Store.open(buildidfs.store) as store:
        artifact = store.index.artifact(1, 1)
        assert artifact
        os.unlink(store.blobs.path(artifact.digest))
    script = (
        "import sys; from buildidfs.mount import daemonize, mountpoint\n"
        "daemonize.start(mountpoint.parse(sys.argv[1], sys.argv[2]), sys.argv[3])"
    )
    run([sys.executable, "-c", script, buildidfs.store, place, log], cwd=REPOSITORY, check=True)
    assert not (place / HEX / "elf").is_symlink()
    with pytest.raises(OSError, match=r"."):
        (place / HEX / "elf").read_bytes()
    buildidfs("unmount", place)
    until(lambda: "unmounted" in log.read_text(), "the last message")
    assert "mounted at" in log.read_text()
    assert "is missing" in log.read_text()


def test_after_a_kill_the_same_place_can_be_used(buildidfs: BuildIdFs, place: Path) -> None:
    for _ in range(2):
        with _serving(buildidfs) as server:
            server.kill()
            server.wait(20)
        with pytest.raises(OSError, match=r".") as caught:
            os.listdir(place)
        assert caught.value.errno == errno.ENOTCONN
    with _serving(buildidfs) as server:
        assert (place / HEX / "elf").read_bytes() == b"bytes"
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0
    assert not is_mountpoint(place), "nothing of the killed ones is below"


def test_what_was_killed_can_be_unmounted(buildidfs: BuildIdFs, place: Path) -> None:
    with _serving(buildidfs) as server:
        server.kill()
        server.wait(20)
    buildidfs("unmount", place)
    assert not is_mountpoint(place)


def test_a_place_that_is_in_use_stays_as_it_is(buildidfs: BuildIdFs, place: Path) -> None:
    with _serving(buildidfs):
        assert "busy" in _refusal(buildidfs, place)
        assert "busy" in _refusal(buildidfs, "--foreground", place)
        assert (place / HEX / "elf").read_bytes() == b"bytes"


def test_places_that_cannot_be_used(buildidfs: BuildIdFs, place: Path) -> None:
    (place / "file").write_text("")
    assert "not empty" in _refusal(buildidfs, place)
    assert "not a directory" in _refusal(buildidfs, place / "file")
    assert "does not exist" in _refusal(buildidfs, place / "missing")
    assert "does not exist" in _refusal(buildidfs, place / "file/below")
    assert not is_mountpoint(place)
    result = buildidfs("unmount", place, check=False)
    assert (result.rc, "not a mount of buildidfs" in result.err) == (40, True)


def test_errors_of_the_store_have_their_own_codes(buildidfs: BuildIdFs, place: Path) -> None:
    (buildidfs.store / "format").write_text("buildidfs store 99\n")
    assert buildidfs("mount", place, check=False).rc == 13
    assert buildidfs("mount", "--foreground", place, check=False).rc == 13
    (buildidfs.store / "format").unlink()
    result = buildidfs("mount", place, check=False)
    assert (result.rc, result.err.count("\n")) == (11, 1)
    assert buildidfs("mount", "-o", "rw", place, check=False).rc == 2
    assert not is_mountpoint(place)


def test_the_parent_raises_what_the_child_raised(buildidfs: BuildIdFs, place: Path) -> None:
    script = """
import sys
from buildidfs.errors import StoreMissing
from buildidfs.mount import daemonize, mountpoint
try:
    daemonize.start(mountpoint.parse(sys.argv[1], sys.argv[2]))
except StoreMissing as error:
    print("raised", error)
"""
    missing = buildidfs.store.parent / "nothing"
    result = run([sys.executable, "-c", script, missing, place], cwd=REPOSITORY, check=True)
    assert result.out.startswith(f"raised no store at {missing}")


@pytest.mark.parametrize("word", ["a b", "tab\there", "back\\slash", "ünï", "new\nline", "\udcff"])
def test_mount_points_of_any_name(buildidfs: BuildIdFs, place: Path, word: str) -> None:
    there = place / word
    there.mkdir()
    with _serving(buildidfs, place=there) as server:
        assert (there / HEX / "elf").read_bytes() == b"bytes"
        assert mountpoint.mounted_at(os.fsencode(there)) is not None
        mountpoint.unmount(os.fsencode(there))
        assert server.wait(20) == 0
    assert mountpoint.mounted_at(os.fsencode(there)) is None


def test_a_mount_point_behind_a_link(buildidfs: BuildIdFs, place: Path) -> None:
    link = place.parent / "link"
    link.symlink_to(place)
    with _serving(buildidfs, place=link) as server:
        assert (place / HEX / "elf").read_bytes() == b"bytes"
        assert "busy" in _refusal(buildidfs, link)
        buildidfs("unmount", link)
        assert server.wait(20) == 0


@pytest.mark.root
def test_read_ahead(buildidfs: BuildIdFs, place: Path) -> None:
    def shown() -> int:
        device = os.stat(place).st_dev
        name = f"{os.major(device)}:{os.minor(device)}"
        return int(Path(f"/sys/class/bdi/{name}/read_ahead_kb").read_text())

    buildidfs("mount", place)
    assert shown() == mountpoint.READ_AHEAD_KIB
    buildidfs("unmount", place)
    buildidfs("mount", "-o", "read_ahead_kb=64", place)
    assert shown() == 64
    buildidfs("unmount", place)


# --- other users ---------------------------------------------------------------------------------


def _as_nobody(argv: Sequence[str | Path]) -> int:
    """The exit code of a command as somebody else; 126 if he may not even run it."""
    user = pwd.getpwnam("nobody")
    try:
        done = subprocess.run(
            argv, user=user.pw_uid, group=user.pw_gid, extra_groups=[], cwd=REPOSITORY,
            capture_output=True, check=False,
        )  # fmt: skip
    except PermissionError:
        return 126
    return done.returncode


@pytest.mark.root
def test_others_are_let_in_by_default_when_root_mounts(buildidfs: BuildIdFs, place: Path) -> None:
    place.parent.chmod(0o755)
    elf = place / HEX / "elf"
    assert _as_nobody([tool("ls"), place]) == 0, "the way there is open"
    with _serving(buildidfs):
        assert stat.S_IMODE(elf.stat().st_mode) == 0o555
        assert _as_nobody([tool("cat"), elf]) == 0
    run([tool("umount"), "-l", place], check=True)
    with _serving(buildidfs, "-o", "noallow_other"):
        assert _as_nobody([tool("cat"), elf]) != 0


def test_another_user_is_told_whose_mount_it_is(buildidfs: BuildIdFs) -> None:
    buildidfs("scan", "tree", tool("true"))
    with buildidfs.mounted() as mount:
        done = as_nobody("unmount", mount)
        assert done.rc == 40, done
        assert done.err == f"buildidfs: {mount} is a mount of root: only root can unmount it\n"
        assert os.path.ismount(mount)


# --- what is missing on the machine --------------------------------------------------------------


def test_what_is_missing_is_named(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*, allow_other: bool = False) -> str:
        with pytest.raises(MountError) as caught:
            mountpoint.prepare(os.fsencode(place), allow_other=allow_other)
        return str(caught.value)

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    configuration = tmp_path / "fuse.conf"
    monkeypatch.setattr(mountpoint, "_CONFIGURATION", str(configuration))
    assert "user_allow_other" in refused(allow_other=True)
    configuration.write_text("# user_allow_other\n")
    assert "user_allow_other" in refused(allow_other=True)
    configuration.write_text("mount_max = 5\n user_allow_other \n")
    mountpoint.prepare(os.fsencode(place), allow_other=True)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "fusermount3 is not installed" in refused()
    monkeypatch.setattr(mountpoint, "_FUSE", str(tmp_path / "fuse"))
    monkeypatch.setattr(machine, "is_contained", lambda: False)
    assert "/fuse does not exist: mknod -m 666 /dev/fuse" in refused()
    monkeypatch.setattr(machine, "is_contained", lambda: True)
    assert "/fuse does not exist: give the container --device /dev/fuse" in refused()


_UNPRIVILEGED = """
# A namespace of its own, where /dev/fuse is open to everybody and fuse.conf is ours to write.
set -eu
cd "$1"
mknod fuse c 10 229
chmod 666 fuse
echo > fuse.conf
mount --bind fuse /dev/fuse
touch /etc/fuse.conf
mount --bind fuse.conf /etc/fuse.conf
user="setpriv --reuid=65534 --regid=65534 --clear-groups"
other="setpriv --reuid=2 --regid=2 --clear-groups"
program="$user $2 -m buildidfs --store $1/store"
set +e
$program mount -o allow_other mnt; echo "refused $?"
$program mount mnt; echo "mounted $?"
$program mount mnt; echo "again $?"
$user cmp mnt/abcdef0123/elf bytes; echo "read $?"
$other cat mnt/abcdef0123/elf; echo "others $?"
$program unmount mnt; echo "unmounted $?"
mountpoint -q mnt; echo "gone $?"
echo user_allow_other > fuse.conf
$program mount -o allow_other mnt; echo "allowed $?"
$other cmp mnt/abcdef0123/elf bytes; echo "others $?"
exec 3< mnt/abcdef0123/path
$program unmount mnt; echo "unmounted $?"
mountpoint -q mnt; echo "gone $?"
exec 3<&-
"""


@pytest.mark.root
def test_an_unprivileged_user_mounts_his_own_store(place: Path) -> None:
    """Through fusermount3, which has to be installed set-user-ID."""
    if not os.stat(tool("fusermount3")).st_mode & stat.S_ISUID:
        pytest.skip("fusermount3 is not set-user-ID here")
    python, environment = _python_for_everybody()
    home = place.parent / "home"
    (home / "mnt").mkdir(parents=True)
    (home / "bytes").write_bytes(b"bytes")
    place.parent.chmod(0o755)
    place.parent.joinpath("store").rename(home / "store")
    run([tool("chown"), "-R", "65534:65534", home], check=True)
    shell = [tool("unshare"), "-m", "sh", "-c", _UNPRIVILEGED, "sh", home, python]
    result = run(shell, env=environment)
    expected = "refused 40 mounted 0 again 40 read 0 others 1 unmounted 0 gone 32"
    expected += " allowed 0 others 0 unmounted 0 gone 32"
    assert result.out.split() == expected.split(), str(result)
    assert "user_allow_other" in result.err
    assert "busy" in result.err


def _python_for_everybody() -> tuple[str, dict[str, str]]:
    """A Python that any user may run, and an environment in which it finds what we have."""
    if _as_nobody([sys.executable, "-c", "import buildidfs.mount.session"]) == 0:
        return sys.executable, {"PYTHONPATH": str(REPOSITORY)}
    packages = os.pathsep.join([str(REPOSITORY), *(p for p in sys.path if "site-packages" in p)])
    environment = {"PYTHONPATH": packages}
    word = tool("env"), f"PYTHONPATH={packages}", "/usr/bin/python3"
    if _as_nobody([*word, "-c", "import buildidfs.mount.session"]) != 0:
        pytest.skip(f"{sys.executable} or its packages are in a place that only root can read")
    return "/usr/bin/python3", environment
