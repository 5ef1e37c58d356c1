# SPDX-License-Identifier: Apache-2.0
"""Programs on FUSE filesystems that root is not let into, captured as the user who mounted them."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from buildidfs.capture.process.scanner import ProcScanner
from buildidfs.capture.unresponsive import helper_process
from buildidfs.capture.unresponsive.as_owner import AsOwner
from buildidfs.ingest import Ingest, StoreMemo
from buildidfs.model import BuildId, Kind, Trust
from buildidfs.store import Store
from tests.support import echo, userfs
from tests.support.captures import read_blob
from tests.support.children import running
from tests.support.clients import run, tool
from tests.support.commands import ROOT
from tests.support.mounts import COMMAND
from tests.support.scans import Memory, Scan, open_descriptors, own_namespaces, remember, scan
from tests.support.waiting import until

if TYPE_CHECKING:
    import subprocess

    from tests.support.mounts import BuildIdFs

pytestmark = [pytest.mark.root, pytest.mark.fuse]

WHERE = ["host", "namespace", "shared"]


@pytest.fixture(autouse=True)
def _descriptors_are_closed() -> Iterator[None]:
    before = open_descriptors()
    yield
    # one that waited for a filesystem may have to notice first that it is gone
    until(lambda: open_descriptors() <= before, "every descriptor closed")


@pytest.fixture
def program(directory: Path) -> Path:
    """A program that only the filesystem shows to others."""
    echo.build(directory / "program")
    return directory / "program"


@contextlib.contextmanager
def from_userfs(
    directory: Path, program: Path, where: str = "host", manners: str = "good"
) -> Iterator[tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]]:
    """Run ``program`` as directory/mnt/app, from a filesystem of a user's; server and process."""
    directory.chmod(0o755)
    target = directory / "mnt"
    target.mkdir()
    with userfs.served(target, program, where, manners) as server:
        argv = [*userfs.entering(server, where), target / "app"]
        with running(argv) as child:
            yield server, child


def scanned(pid: int, as_owner: AsOwner | None = None, memo: Memory | None = None) -> Scan:
    memo = Memory() if memo is None else memo
    scanner = ProcScanner(memo, pids=[pid], initial=own_namespaces(), as_owner=as_owner)
    return scan(scanner)


@pytest.mark.parametrize("where", WHERE)
def test_without_the_setting_it_is_named_with_its_remedy(
    directory: Path, program: Path, where: str
) -> None:
    with from_userfs(directory, program, where) as (_, child):
        with pytest.raises(PermissionError):
            (directory / "mnt/app" if where == "host" else app_of(child)).read_bytes()
        (item,) = scanned(child.pid).unreadable
    assert item.path == os.fsencode(directory / "mnt/app")
    assert item.errno == errno.EACCES
    assert "fuse-as-owner = true" in item.reason
    assert item.build_id == BuildId.from_hex(echo.build_id_of(program))


def app_of(child: subprocess.Popen[bytes]) -> Path:
    return Path(f"/proc/{child.pid}/exe")


@pytest.mark.parametrize("where", WHERE)
def test_captured_as_its_owner(directory: Path, program: Path, where: str) -> None:
    with from_userfs(directory, program, where) as (_, child), AsOwner() as as_owner:
        result = scanned(child.pid, as_owner)
        memory = Memory()
        remember(memory, result)
        second = scanned(child.pid, as_owner, memory)
    assert result.unreadable == []
    assert result.data(directory / "mnt/app") == program.read_bytes()
    (seen,) = [seen for seen in result.pinned if seen.path.endswith(b"/app")]
    origin = seen.pinned.sighting.origin
    assert origin.trust is (Trust.UNKNOWN if where == "host" else Trust.CONTAINER)
    # Only the mounter could read it, whatever its server says: -rwxr-xr-x of root's.
    assert (origin.identity.uid, origin.identity.gid) == (userfs.UID, userfs.UID)
    assert stat.filemode(origin.identity.mode) == "-rwx------"
    assert second.paths() == []
    assert origin.identity in {again.sighting.origin.identity for again in second.again}


def test_the_command(buildidfs: BuildIdFs, directory: Path, program: Path) -> None:
    settings = directory / "buildidfs.toml"
    settings.write_text("[capture]\nfuse-as-owner = true\n")
    with from_userfs(directory, program) as (_, child):
        without = buildidfs("scan", "proc", "--pid", str(child.pid), check=False)
        assert without.rc == 3
        assert f"(build ID {echo.build_id_of(program)})" in without.err
        buildidfs("--config", settings, "scan", "proc", "--pid", str(child.pid))
    assert held(buildidfs.store, program) == [program.read_bytes()]


def test_without_the_privileges(buildidfs: BuildIdFs, directory: Path, program: Path) -> None:
    settings = directory / "buildidfs.toml"
    settings.write_text("[capture]\nfuse-as-owner = true\n")
    scan_proc = [*COMMAND, "--store", buildidfs.store, "--config", settings, "scan", "proc"]
    with from_userfs(directory, program) as (_, child):
        less = [tool("setpriv"), "--bounding-set=-setuid,-setgid"]
        result = run([*less, *scan_proc, "--pid", str(child.pid)], cwd=ROOT)
    assert result.rc == 3, str(result)
    assert "needs CAP_SETGID, CAP_SETUID" in result.err


def held(directory: Path, program: Path) -> list[bytes]:
    with Store.open(directory) as store:
        ordinal = store.index.ordinal(BuildId.from_hex(echo.build_id_of(program)))
        if ordinal is None:
            return []
        kinds = store.index.variants(ordinal, Kind.EXECUTABLE)
        return [read_blob(store, variant.digest) for variant in kinds]


def test_as_the_store_has_it(directory: Path, program: Path) -> None:
    with (
        from_userfs(directory, program, "namespace") as (_, child),
        AsOwner() as as_owner,
        Store.open(directory / "store", create=True) as store,
    ):
        for _ in range(2):
            scanner = ProcScanner(
                StoreMemo(store), pids=[child.pid], initial=own_namespaces(), as_owner=as_owner
            )
            summary = Ingest(store).run(scanner)
            assert summary.unreadable == []
        assert (summary.captured, summary.copied_bytes) == (0, 0)
        ordinal = store.index.ordinal(BuildId.from_hex(echo.build_id_of(program)))
        assert ordinal is not None
        artifact = store.index.artifact(ordinal, Kind.EXECUTABLE)
        assert artifact is not None
        # whoever may not write to the mount is not shown that its owner could
        assert (artifact.uid, artifact.mode) == (userfs.UID, 0o500)


# --- servers that mean no good --------------------------------------------------------------------


@pytest.mark.parametrize("how", ["stopped", "keeps"])
def test_server_that_does_not_answer(directory: Path, program: Path, how: str) -> None:
    """What it has taken and keeps not even SIGKILL gets back from it."""
    with from_userfs(directory, program, manners=how) as (server, child):
        if how == "keeps":
            userfs.turn_bad(server)
        else:
            server.send_signal(signal.SIGSTOP)
        with AsOwner(seconds=0.5) as as_owner:
            began = time.monotonic()
            (item,) = scanned(child.pid, as_owner).unreadable
            first = time.monotonic() - began
            (again,) = scanned(child.pid, as_owner).unreadable
            second = time.monotonic() - began - first
    assert item.errno == again.errno == errno.ETIMEDOUT
    assert item.reason == f"as its owner, uid {userfs.UID}: its filesystem does not answer"
    assert first < 10
    assert second < 0.5  # not waited for again


def test_the_user_may_not_look_into_who_reads_for_them(directory: Path, program: Path) -> None:
    with (
        from_userfs(directory, program, manners="keeps") as (server, child),
        AsOwner(seconds=10) as as_owner,
    ):
        assert scanned(child.pid, as_owner).unreadable == []
        userfs.turn_bad(server)
        results: list[Scan] = []
        waiting = threading.Thread(target=lambda: results.append(scanned(child.pid, as_owner)))
        waiting.start()
        try:
            reader = until(lambda: user_child(as_owner.pid), "somebody who is that user")
            as_user = userfs.entering(server, "host")
            for words in (("cat", "environ"), ("cat", "maps"), ("ls", "fd/")):
                result = run([*as_user, tool(words[0]), f"/proc/{reader}/{words[1]}"])
                assert "ermission denied" in result.err, str(result)
        finally:
            server.kill()
            waiting.join(30)
    (item,) = results[0].unreadable
    assert item.errno in (errno.ENOTCONN, errno.ECONNABORTED)


def user_child(pid: int) -> str:
    """The child of the helper that has become the user, if there is one."""
    try:
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            if f"Uid:\t{userfs.UID}\t" in Path(f"/proc/{child}/status").read_text():
                return child
    except OSError:
        pass  # it has ended
    return ""


def test_server_that_shows_other_bytes(directory: Path, program: Path) -> None:
    with (
        from_userfs(directory, program, manners="lies") as (server, child),
        AsOwner() as as_owner,
    ):
        assert scanned(child.pid, as_owner).unreadable == []
        userfs.turn_bad(server)
        (item,) = scanned(child.pid, as_owner).unreadable
    assert item.errno == errno.ESTALE
    assert "not the bytes that are mapped" in item.reason


def test_name_that_leads_elsewhere_leads_nowhere(directory: Path, program: Path) -> None:
    """The mounter puts a link to what only root may read where the program was."""
    secret = directory / "secret"
    secret.write_bytes(program.read_bytes())
    secret.chmod(0o600)
    with from_userfs(directory, program) as (_, child), AsOwner() as as_owner:
        mount = directory / "mnt"
        userfs.detach(mount)
        (mount / "app").symlink_to(secret)
        result = scanned(child.pid, as_owner)
    (item,) = result.unreadable
    assert item.path.endswith(b"/app")
    assert item.errno == errno.EACCES
    assert program.read_bytes() not in [seen.data for seen in result.pinned]


def test_helper_that_was_killed(directory: Path, program: Path) -> None:
    with from_userfs(directory, program) as (_, child), AsOwner() as as_owner:
        for _ in range(3):
            assert scanned(child.pid, as_owner).data(directory / "mnt/app") == program.read_bytes()
            os.kill(as_owner.pid, signal.SIGKILL)
            (item,) = scanned(child.pid, as_owner).unreadable
            assert "the helper that reads files as their owners was ended" in item.reason
        (item,) = scanned(child.pid, as_owner).unreadable
        assert "was ended too often" in item.reason
        assert as_owner.pid == 0


def test_file_that_is_too_large(directory: Path, program: Path) -> None:
    large = directory / "large"
    large.write_bytes(program.read_bytes())
    large.chmod(0o755)
    os.truncate(large, helper_process.MAX_BYTES + 1)
    with from_userfs(directory, large) as (_, child), AsOwner() as as_owner:
        (item,) = scanned(child.pid, as_owner).unreadable
    assert item.errno == errno.EFBIG
