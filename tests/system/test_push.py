# SPDX-License-Identifier: Apache-2.0
"""`buildidfs push`: the command line, debuginfod clients on the bare bucket, and kills."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from buildidfs.fleet import objects
from buildidfs.model import BuildId
from tests.support.clients.commands import ROOT
from tests.support.clients.tools import debuginfod_find
from tests.support.elf import elfwriter
from tests.support.harness.mounts import COMMAND, BuildIdFs, start
from tests.support.harness.waiting import until
from tests.support.servers.objectstorage import SECRET, ObjectStorage, object_storage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.clients.tools import Argument
    from tests.support.harness.mounts import Process

_FILES = 30


@pytest.fixture
def storage() -> Iterator[ObjectStorage]:
    """Object storage with the bucket ``fleet``."""
    with object_storage("fleet") as server:
        yield server


def _elf(number: int, size: int = 2000) -> tuple[BuildId, bytes]:
    build_id = BuildId(hashlib.sha1(b"%d" % number, usedforsecurity=False).digest())
    section = elfwriter.Section(b".text", bytes([number % 256]) * size, flags=6)
    note = elfwriter.Section(
        b".note.gnu.build-id",
        elfwriter.build_id_note(build_id),
        type=elfwriter.SHT_NOTE,
        segment=elfwriter.PT_NOTE,
    )
    return build_id, elfwriter.elf_file([section, note])


@pytest.fixture
def filled(directory: Path, buildidfs: BuildIdFs) -> dict[BuildId, bytes]:
    """The files in the store of ``buildidfs``."""
    files = dict(_elf(number) for number in range(_FILES))
    tree = directory / "tree"
    tree.mkdir()
    for build_id, data in files.items():
        (tree / str(build_id)).write_bytes(data)
        (tree / str(build_id)).chmod(0o755)
    buildidfs("scan", "tree", tree)
    return files


def _config(directory: Path, bucket: str = "fleet") -> Path:
    file = directory / f"{bucket}.toml"
    file.write_text(f'[remote]\nurl = "s3://{bucket}"\n')
    return file


def _push(
    buildidfs: BuildIdFs, storage: ObjectStorage, config: Path, *words: str
) -> subprocess.Popen[bytes]:
    argv = [*COMMAND, "--config", str(config), "--store", str(buildidfs.store), "push", *words]
    return subprocess.Popen(
        argv,
        env={**os.environ, **storage.environ()},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )


def _begun(*words: Argument) -> Process:
    """A command that has started; no test reads its outputs."""
    with open(os.devnull, "wb") as output:
        return start([*COMMAND, *words], output.fileno())


def _blobs(storage: ObjectStorage) -> dict[BuildId, bytes]:
    found = {}
    for key, stored in [*storage.buckets["fleet"].items()]:
        parsed = objects.parse_blob_key(key)
        if parsed is not None:
            digest = objects.described(stored.metadata).digest
            assert digest == hashlib.sha256(stored.data).digest(), "a half object is visible"
            found[parsed[0]] = stored.data
    return found


def test_bare_bucket_is_a_debuginfod(
    directory: Path, buildidfs: BuildIdFs, storage: ObjectStorage, filled: dict[BuildId, bytes]
) -> None:
    config = _config(directory)
    pushing = _push(buildidfs, storage, config, "--all", "--json")
    out, err = pushing.communicate(timeout=60)
    assert (pushing.returncode, err) == (0, b"")
    assert json.loads(out)["pushed"] == _FILES
    build_id, data = next(iter(filled.items()))
    found = debuginfod_find(f"{storage.url}/fleet", "executable", str(build_id))
    assert Path(found.out.strip()).read_bytes() == data


def test_one_build_id(
    directory: Path, buildidfs: BuildIdFs, storage: ObjectStorage, filled: dict[BuildId, bytes]
) -> None:
    build_id = next(iter(filled))
    pushing = _push(buildidfs, storage, _config(directory), str(build_id))
    out, err = pushing.communicate(timeout=60)
    assert pushing.returncode == 0, err
    assert out.startswith(b"1 file pushed")
    assert [*_blobs(storage)] == [build_id]


@pytest.mark.parametrize(
    ("bucket", "words", "code", "message"),
    [
        ("missing", ["--all"], 50, "there is no such bucket"),
        ("fleet", [], 2, "push takes build IDs"),
        ("fleet", ["--all", "--watch"], 2, "push takes build IDs"),
        ("fleet", ["0123456789"], 30, "nothing is known"),
    ],
)
def test_failure_is_one_line(
    directory: Path,
    buildidfs: BuildIdFs,
    storage: ObjectStorage,
    filled: dict[BuildId, bytes],
    bucket: str,
    words: list[str],
    code: int,
    message: str,
) -> None:
    pushing = _push(buildidfs, storage, _config(directory, bucket), *words)
    _, err = pushing.communicate(timeout=60)
    assert pushing.returncode == code
    assert message in err.decode()
    assert err.count(b"\n") == 1


def test_keys_that_are_refused_are_not_shown(
    directory: Path, buildidfs: BuildIdFs, storage: ObjectStorage, filled: dict[BuildId, bytes]
) -> None:
    storage.fault = lambda method, key: 403
    pushing = _push(buildidfs, storage, _config(directory), "--all", "-vv")
    _, err = pushing.communicate(timeout=60)
    assert pushing.returncode == 50
    assert b"access denied" in err
    assert SECRET.encode() not in err


def test_config_without_a_bucket(buildidfs: BuildIdFs, filled: dict[BuildId, bytes]) -> None:
    done = buildidfs("push", "--all", check=False)
    assert done.rc == 2
    assert "[remote]" in done.err


def _without_note(err: str) -> str:
    return err.replace("s3://fleet is a new bucket: each file is looked up in it\n", "")


@pytest.mark.parametrize("request_is_lost", [True, False])
def test_push_that_is_killed_goes_on(
    directory: Path,
    buildidfs: BuildIdFs,
    storage: ObjectStorage,
    filled: dict[BuildId, bytes],
    monkeypatch: pytest.MonkeyPatch,
    request_is_lost: bool,
) -> None:
    for name, value in storage.environ().items():
        monkeypatch.setenv(name, value)
    pushing = BuildIdFs(directory, buildidfs.store, _config(directory))
    words: list[Argument] = ["--config", _config(directory), "--store", buildidfs.store]
    for kill_at in (1, 4, 20, 40):
        storage.buckets["fleet"].clear()
        storage.requests.clear()
        started: list[Process] = []
        count = 0

        def kill(method: str, key: str, kill_at: int = kill_at) -> int:
            nonlocal count
            count += 1
            if count != kill_at:
                return 0
            until(lambda: started, "the process")  # noqa: B023
            started[0].kill()  # noqa: B023
            started[0].wait()  # noqa: B023
            return -1 if request_is_lost else 0

        storage.fault = kill
        started.append(_begun(*words, "push", "--all"))
        started[0].wait(60)
        until(lambda: count >= kill_at or started[0].returncode == 0, "the kill")  # noqa: B023
        assert started[0].returncode == -signal.SIGKILL
        _blobs(storage)
        storage.fault = lambda method, key: 0
        again = pushing("push", "--all", check=False)
        # A push that was killed early has not recorded which bucket it is.
        assert (again.rc, _without_note(again.err)) == (0, ""), kill_at
        assert _blobs(storage) == filled
        assert not [key for key in storage.buckets["fleet"] if key.startswith("variant/")]


def test_watch_pushes_what_is_captured_until_told_to_end(
    directory: Path, buildidfs: BuildIdFs, storage: ObjectStorage, filled: dict[BuildId, bytes]
) -> None:
    pushing = _push(buildidfs, storage, _config(directory), "--watch")
    with contextlib.ExitStack() as stack:
        stack.callback(pushing.wait, 30)
        stack.callback(pushing.kill)
        until(lambda: len(_blobs(storage)) == _FILES, "all files in the bucket", 30)
        build_id, data = _elf(_FILES)
        file = directory / "new"
        file.write_bytes(data)
        file.chmod(0o755)
        buildidfs("add", file)
        until(lambda: build_id in _blobs(storage), "the new file in the bucket", 30)
        pushing.terminate()
        _, err = pushing.communicate(timeout=30)
        assert (pushing.returncode, err) == (0, b"")


@pytest.mark.parametrize("outage", ["from the start", "later"])
def test_watch_ends_when_it_is_told_to_in_an_outage(
    directory: Path,
    buildidfs: BuildIdFs,
    storage: ObjectStorage,
    filled: dict[BuildId, bytes],
    outage: str,
) -> None:
    refused = 0

    def away(method: str, key: str) -> int:
        nonlocal refused
        if outage == "later" and not _blobs(storage):
            return 0
        refused += 1
        return 503

    storage.fault = away
    pushing = _push(buildidfs, storage, _config(directory), "--watch")
    with contextlib.ExitStack() as stack:
        stack.callback(pushing.wait, 30)
        stack.callback(pushing.kill)
        until(lambda: refused > 3, "a request that is refused", 30)
        pushing.terminate()
        _, err = pushing.communicate(timeout=60)
    assert pushing.returncode == 0, err.decode()
    assert b"Traceback" not in err


def test_pushes_of_one_store_at_the_same_time(
    directory: Path, buildidfs: BuildIdFs, storage: ObjectStorage, filled: dict[BuildId, bytes]
) -> None:
    build_id, data = _elf(_FILES, 70 << 20)  # uploaded in parts
    file = directory / "large"
    file.write_bytes(data)
    file.chmod(0o755)
    buildidfs("add", file)
    config = _config(directory)
    counts = []
    with contextlib.ExitStack() as stack:
        every = []
        for _ in range(4):
            pushing = _push(buildidfs, storage, config, "--all", "--json")
            stack.callback(pushing.wait, 30)
            stack.callback(pushing.kill)
            every.append(pushing)
        for pushing in every:
            out, err = pushing.communicate(timeout=120)
            assert (pushing.returncode, err.decode()) == (0, "")
            counts.append(json.loads(out))
    assert _blobs(storage) == {**filled, build_id: data}
    assert sum(each["pushed"] for each in counts) >= _FILES + 1
    assert not [key for key in storage.buckets["fleet"] if key.startswith(("variant/", "upload/"))]
    storage.requests.clear()
    again = _push(buildidfs, storage, config, "--all", "--json")
    out, err = again.communicate(timeout=60)
    assert (again.returncode, err, json.loads(out)["present"]) == (0, b"", _FILES + 1)
    assert storage.count("PUT", "buildid/") == 0
