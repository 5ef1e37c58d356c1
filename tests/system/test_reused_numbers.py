# SPDX-License-Identifier: Apache-2.0
"""Numbers of processes and namespaces are used again at once: nobody is taken for another."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

import pytest

from buildidfs.capture.base import PinnedFile, Unreadable
from buildidfs.capture.process import process, scanner
from buildidfs.capture.process.scanner import ProcScanner
from buildidfs.ingest import Ingest, StoreMemo
from buildidfs.model import BuildId, Origin
from buildidfs.store import Store
from tests.support.clients.tools import tool
from tests.support.elf import echo
from tests.support.harness.children import running
from tests.support.harness.pids import running_as
from tests.support.harness.scans import Memory, open_descriptors, own_namespaces, scan

# A watch keeps the namespaces of what has ended, and then their numbers are not used again.
pytestmark = [pytest.mark.root, pytest.mark.unwatched]

_ON_TMPFS = 'set -eu; mount -t tmpfs none "$1"; cp "$2" "$1/app"; exec "$1/app"'
_TRIES = 40


def capture(store: Store, pid: int) -> None:
    summary = Ingest(store).run(ProcScanner(StoreMemo(store), pids=[pid], initial=own_namespaces()))
    assert summary.unreadable == []


def origins(store: Store, build_id: str) -> list[Origin]:
    ordinal = store.index.ordinal(BuildId.from_hex(build_id))
    if ordinal is None:
        return []
    return [record.origin for record in store.index.origins(ordinal)]


def test_containers_with_the_same_namespace_number(directory: Path) -> None:
    """One after the other, alike in all that a label or a path says, and yet two."""
    build_id = echo.build(directory / "program")
    target = directory / "mnt"
    target.mkdir()
    argv = [tool("unshare"), "-m", "sh", "-c", _ON_TMPFS, "sh", target, directory / "program"]
    met: dict[int, list[int]] = defaultdict(list)
    with Store.open(directory / "store", create=True) as store:
        for _ in range(_TRIES):
            with running(argv) as child:
                inode = os.stat(f"/proc/{child.pid}/ns/mnt").st_ino
                capture(store, child.pid)
                met[inode].append(child.pid)
            if len(met[inode]) > 1:
                break
        else:
            pytest.skip(f"the kernel gave {_TRIES} namespaces {_TRIES} numbers")
        alike = [each for each in origins(store, build_id) if each.namespaces.mnt == inode]
    assert len(alike) == 2
    one, two = alike
    assert one.container == two.container == f"mnt:{inode}"
    assert one.path == two.path == os.fsencode(target / "app")
    assert 0 != one.mnt_ns_id != two.mnt_ns_id != 0
    assert one.identity.scope != two.identity.scope


def test_process_number_used_again_between_scans(directory: Path) -> None:
    programs = [directory / "first", directory / "second"]
    ids = [echo.build(path) for path in programs]
    with Store.open(directory / "store", create=True) as store:
        with running([programs[0]]) as child:
            capture(store, child.pid)
        (before,) = records(store, ids[0])
        with running_as(child.pid, programs[1]):
            capture(store, child.pid)
        assert records(store, ids[0]) == [before]
        assert [origin.path for origin in origins(store, ids[1])] == [os.fsencode(programs[1])]


def records(store: Store, build_id: str) -> list[object]:
    ordinal = store.index.ordinal(BuildId.from_hex(build_id))
    assert ordinal is not None
    return list(store.index.origins(ordinal))


def test_process_number_used_again_during_a_scan(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left to be seen of the first is not looked for in the second."""
    first, second, library = directory / "first", directory / "second", directory / "lib.so"
    echo.build(second)
    echo.build_library(library)
    first.write_bytes(Path(tool("cat")).resolve().read_bytes())
    first.chmod(0o755)
    for module in (process, scanner):
        monkeypatch.setattr(module, "OPENED_AHEAD", 1)  # else all files are open by then
    descriptors = open_descriptors()
    with running([tool("env"), f"LD_PRELOAD={library}", first]) as child:
        whole = scan(ProcScanner(Memory(), pids=[child.pid], initial=own_namespaces())).paths()
        assert {os.fsencode(first), os.fsencode(library)} <= set(whole)
        found = iter(ProcScanner(Memory(), pids=[child.pid], initial=own_namespaces()))
        seen = []
        for item in found:
            assert isinstance(item, PinnedFile)
            with item:
                seen.append(item.sighting.origin.path)
            if item.sighting.origin.path == os.fsencode(first):
                break
    with running_as(child.pid, second):
        for item in found:
            if isinstance(item, PinnedFile):
                with item:
                    seen.append(item.sighting.origin.path)
            else:
                assert isinstance(item, Unreadable)
        after = scan(ProcScanner(Memory(), pids=[child.pid], initial=own_namespaces())).paths()
    assert os.fsencode(second) not in seen
    assert len(seen) < len(whole)  # it did end in the middle
    assert os.fsencode(second) in after
    assert open_descriptors() == descriptors


def test_number_of_the_control_group(directory: Path) -> None:
    build_id = echo.build(directory / "program")
    with Store.open(directory / "store", create=True) as store:
        with running([directory / "program"]) as child:
            capture(store, child.pid)
            text = Path(f"/proc/{child.pid}/cgroup").read_text()
        (origin,) = origins(store, build_id)
    (path,) = [line[3:] for line in text.splitlines() if line.startswith("0::")] or [""]
    places = [Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup")]
    mounted = [place for place in places if (place / "cgroup.controllers").exists()]
    if not mounted or not path:
        pytest.skip("no cgroup2 mounted here")
    assert origin.cgroup_id == os.stat(f"{mounted[0]}{path}").st_ino
