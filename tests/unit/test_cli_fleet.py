# SPDX-License-Identifier: Apache-2.0
"""buildidfs.cli.fleet: questions about two hosts, answered without a store."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import zstandard
from click.testing import CliRunner

from buildidfs import config
from buildidfs.cli.main import cli
from buildidfs.errors import ArtifactMissing, BuildIdFsError, RemoteDenied, UsageError
from buildidfs.fleet import objects
from buildidfs.fleet.bucket import Bucket
from buildidfs.fleet.push import Pusher, PushOptions
from buildidfs.linux import machine
from buildidfs.model import BuildId, Kind
from buildidfs.store import Store
from tests.support.harness.captures import NOW, SECOND, capture, commit, sighting
from tests.support.servers.objectstorage import ObjectStorage, object_storage

if TYPE_CHECKING:
    from collections.abc import Iterator

URL = "s3://fleet"
LIBC, APP, SECRET = (BuildId(bytes([number]) * 20) for number in (0xAA, 0xAB, 0xCC))


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStorage]:
    """Object storage with an empty bucket."""
    with object_storage("fleet") as server:
        for name, value in server.environ().items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def hosts(storage: ObjectStorage, tmp_path: Path) -> Iterator[None]:
    """Two hosts have pushed."""
    libc = sighting(b"/usr/lib/libc.so.6")
    in_container = sighting(
        b"/lib/libc.so.6", container="docker:ab", seen_ns=NOW + 5 * SECOND, dev=9
    )
    app = sighting(b"/opt/app", seen_ns=NOW + SECOND)
    secret = sighting(b"/root/secret", mode=0o100700)
    for name in ("north", "south"):
        with Store.create(tmp_path / name) as store:
            commit(
                store,
                capture(store, b"libc", LIBC, at=libc),
                capture(store, b"secret", SECRET, at=secret),
            )
            commit(store, capture(store, b"app of " + name.encode(), APP, at=app))
            if name == "south":
                commit(store, capture(store, b"libc", LIBC, at=in_container))
            machine.call(name)
            settings = config.RemoteSettings(url=URL)
            with Pusher(store, settings, PushOptions(patience_s=0)) as pusher:
                assert pusher.run().failed == []
    yield
    machine.call("")


def _run(tmp_path: Path, *words: str, url: str = URL) -> list[Any]:
    file = tmp_path / "fleet.toml"
    file.write_text(f'[remote]\nurl = "{url}"\n' if url else "")
    done = CliRunner().invoke(cli, ["--config", str(file), "fleet", *words, "--json"])
    if isinstance(done.exception, BuildIdFsError):
        raise done.exception
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.usefixtures("hosts")
def test_status_lists_hosts(tmp_path: Path) -> None:
    rows = _run(tmp_path, "status")
    assert [row["host"] for row in rows] == ["south", "north"]
    assert [(row["files"], row["private"], row["manifests"]) for row in rows] == [(2, 1, 1)] * 2


@pytest.mark.usefixtures("hosts")
def test_which_finds_paths_of_all_hosts(tmp_path: Path) -> None:
    rows = _run(tmp_path, "which", "*/libc.so.6")
    found = [(row["host"], row["container"], row["path"]) for row in rows]
    assert found[0] == ("south", "docker:ab", "/lib/libc.so.6")
    assert sorted(found[1:]) == [(host, "", "/usr/lib/libc.so.6") for host in ("north", "south")]
    assert {row["build_id"] for row in rows} == {str(LIBC)}
    assert _run(tmp_path, "which", "*secret*") == []


@pytest.mark.usefixtures("hosts")
def test_where_finds_hosts_of_a_build_id(tmp_path: Path) -> None:
    rows = _run(tmp_path, "where", str(APP)[:8])
    assert [(row["host"], row["state"]) for row in rows] == [
        ("north", "pushed"),
        ("south", "variant"),
    ]
    with pytest.raises(ArtifactMissing):
        _run(tmp_path, "where", str(SECRET))
    with pytest.raises(UsageError, match="not a build ID"):
        _run(tmp_path, "where", "a")


@pytest.mark.usefixtures("hosts")
def test_why_names_the_reason(tmp_path: Path, storage: ObjectStorage) -> None:
    def states(build_id: BuildId) -> list[str]:
        return [row["state"] for row in _run(tmp_path, "why", str(build_id))]

    assert states(LIBC) == ["present", "unknown"]
    assert states(SECRET) == ["private", "unknown"]
    assert states(BuildId(b"\1" * 20)) == ["unknown", "unknown"]
    text = _run(tmp_path, "why", str(APP))[0]["text"]
    assert "pushed by north" in text
    assert "1 with other bytes" in text
    del storage.buckets["fleet"][objects.blob_key(LIBC, Kind.EXECUTABLE)]
    assert states(LIBC) == ["removed", "unknown"]
    other = BuildId(b"\2" * 20)
    Bucket(URL).create(objects.blob_key(other, Kind.DEBUGINFO), b"of another program", {})
    assert states(other) == ["unknown", "hidden"]
    (state,) = _run(tmp_path, "filter", "--rebuild")
    # The application, the file of another program, and for a day the one that was removed.
    assert state["files"] == 3
    assert states(other) == ["unknown", "present"]


@pytest.mark.usefixtures("hosts")
def test_why_takes_the_beginning_of_a_build_id(tmp_path: Path) -> None:
    assert _run(tmp_path, "why", "abab") == _run(tmp_path, "why", str(APP))
    with pytest.raises(ArtifactMissing, match="no manifest lists cccc; give the whole ID"):
        _run(tmp_path, "why", "cccc")


def test_empty_bucket(tmp_path: Path, storage: ObjectStorage) -> None:
    assert _run(tmp_path, "status") == []
    (state,) = _run(tmp_path, "filter")
    assert state["generation"] == 0
    (state,) = _run(tmp_path, "filter", "--rebuild")
    assert state["generation"] == 1


def test_missing_bucket(tmp_path: Path, storage: ObjectStorage) -> None:
    with pytest.raises(RemoteDenied, match="no such bucket"):
        _run(tmp_path, "status", url="s3://another")
    with pytest.raises(UsageError, match=r"\[remote\]"):
        _run(tmp_path, "status", url="")


def _manifest(host: str, text: bytes, packed: bool = True) -> None:
    data = zstandard.compress(text) if packed else text
    key = f"host/{host}/20260101T000000-{secrets.token_hex(4)}.jsonl.zst"
    assert Bucket(URL).create(key, data, {})


def _hostile(**changes: object) -> bytes:
    place = {"path": "/bin/a\x1b[2J\n\u202eb", "container": "\x1b]0;x\x07", "first": 1, "last": 2}
    row = {"id": "ab" * 20, "kind": "executable", "sha256": "00", "size": 5, "state": "pushed"}
    return json.dumps({**row, "places": [{**place, **changes}], **changes}).encode() + b"\n"


@pytest.mark.usefixtures("hosts")
def test_hostile_manifests_do_no_harm(tmp_path: Path) -> None:
    hostile = {
        "names": _hostile(),
        "fields": _hostile(id="ab" * 20 + "\x1b[31m", kind="\x1b[0m", sha256="\n", state="\r"),
        "large": _hostile(first=10**18, last=10**18, size=10**18),
        "small": _hostile(first=-(10**18), last=-(10**18), size=-(10**18)),
        "deep": b"[" * 900_000 + b"\n",
        "deep-value": b'{"id":' + b"[" * 900_000,
        "long": b"x" * (64 << 20),
        "bytes": b"\xff\xfe\n",
    }
    for host, text in hostile.items():
        _manifest(host, text)
    assert {row["host"] for row in _run(tmp_path, "status")} == {"north", "south", *hostile}
    file = tmp_path / "fleet.toml"
    for words in (["status"], ["which", "*"], ["where", "ab" * 20], ["why", "ab" * 20]):
        done = CliRunner().invoke(cli, ["--config", str(file), "fleet", *words])
        assert isinstance(done.exception, BuildIdFsError | SystemExit | None), done.exception
        assert not set("\x1b\x07\r\u202e") & set(done.output)
        assert "libc.so.6" in done.output or words[0] != "which"


@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize(("text", "packed"), [(b"{", True), (b"no zstd", False)])
def test_damaged_manifest_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: bytes, packed: bool
) -> None:
    _manifest("mallory", text, packed)
    _run(tmp_path, "status")
    assert "host/mallory/" in caplog.text


@pytest.mark.usefixtures("hosts")
def test_manifest_that_is_too_large_is_not_read(
    tmp_path: Path, storage: ObjectStorage, caplog: pytest.LogCaptureFixture
) -> None:
    _manifest("mallory", bytes(80 << 20), packed=False)
    storage.requests.clear()
    _run(tmp_path, "status")
    assert "host/mallory/" in caplog.text
    assert storage.sent("host/mallory") == 0
