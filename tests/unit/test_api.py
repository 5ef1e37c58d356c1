# SPDX-License-Identifier: Apache-2.0
"""buildidfs.api: the public Python API does what docs/python.md says of it."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import buildidfs
from buildidfs import BuildId, Kind, Store
from buildidfs.errors import (
    AmbiguousBuildId,
    ArtifactMissing,
    InvalidBuildId,
    StoreMissing,
    UsageError,
)
from tests.support.elf.elfwriter import elf_file

ROOT = Path(__file__).resolve().parents[2]
ID = BuildId.from_hex("8e9fd827446c24067541ac5390e6f527fb5947bb")
EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text(), re.DOTALL)
_IMPORT = (
    "import sys; before = set(sys.modules); import buildidfs; print(*set(sys.modules) - before)"
)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A store with one executable of `ID`."""
    binary = tmp_path / "server"
    binary.write_bytes(elf_file(build_id=ID))
    with Store.open(tmp_path / "public", create=True) as store:
        assert store.add(binary).captured == 1
    return tmp_path / "public"


def test_import_loads_no_other_module() -> None:
    command = [sys.executable, "-c", _IMPORT]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["buildidfs"]


def test_public_names_are_there() -> None:
    assert {name: getattr(buildidfs, name) for name in buildidfs.__all__}
    with pytest.raises(AttributeError, match="no attribute 'Stroe'"):
        _ = buildidfs.Stroe  # type: ignore[attr-defined]


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_examples_of_the_document_run(
    number: int, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    firmware = tmp_path / "firmware.elf"
    firmware.write_bytes(elf_file(build_id=None))
    text = EXAMPLES[number]
    for shown, real in (
        ("/var/lib/buildidfs", place),
        ("/srv/store", tmp_path / "another"),
        ("/srv/firmware.elf", firmware),
    ):
        text = text.replace(shown, str(real))
    exec(compile(text, "docs/python.md", "exec"), {})
    assert capsys.readouterr().out


def test_store_finds_and_reads_what_was_added(place: Path) -> None:
    with Store.open(place) as store:
        assert list(store) == [ID]
        assert ID in store
        assert store.find("8e9f") == ID
        assert store.paths(ID) == [bytes(place.parent / "server")]
        artifact = store.artifacts(ID)[Kind.EXECUTABLE]
        assert store.read(artifact) == elf_file(build_id=ID)
        with store.open_blob(artifact) as blob:
            assert blob.pread(4, 0) == b"\x7fELF"


def test_store_says_what_it_does_not_have(place: Path) -> None:
    other = BuildId(b"\x01\x02\x03")
    with Store.open(place) as store:
        assert other not in store
        assert (store.artifacts(other), store.paths(other)) == ({}, [])
        with pytest.raises(ArtifactMissing):
            store.find("0102")
        with pytest.raises(InvalidBuildId):
            store.find("no hex")
    with pytest.raises(StoreMissing):
        Store.open(place.parent / "nothing")


def test_beginning_of_two_build_ids_is_ambiguous(place: Path, tmp_path: Path) -> None:
    sibling = tmp_path / "sibling"
    sibling.write_bytes(elf_file(build_id=b"\x8e\x9f\x00\x00"))
    with Store.open(place, create=True) as store:
        store.add(sibling)
        with pytest.raises(AmbiguousBuildId):
            store.find("8e9f")


def test_store_open_for_reading_refuses_files(place: Path) -> None:
    with Store.open(place) as store:
        with pytest.raises(UsageError, match="create=True"):
            store.add("/bin/true")
        with pytest.raises(UsageError, match="create=True"):
            store.add_files([])


def test_added_files_have_the_path_given(place: Path) -> None:
    with Store.open(place, create=True) as store, tempfile.TemporaryFile() as file:
        file.write(elf_file(build_id=b"\x11" * 20))  # still in Python's buffer
        summary = store.add_files([("/wheel/fast.so", file)])
        assert (summary.captured, summary.new_ids, summary.unreadable) == (1, 1, [])
        assert store.paths(BuildId(b"\x11" * 20)) == [b"/wheel/fast.so"]
        again = store.add_files([("/wheel/fast.so", file)])
        assert (again.captured, again.held) == (0, 1)
        assert not file.closed
