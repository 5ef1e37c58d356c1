# SPDX-License-Identifier: Apache-2.0
"""Debug packages of a Debian mirror: real packages, by HTTP and from a directory."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from buildidfs.errors import UsageError
from buildidfs.formats.archive import apt_lists
from buildidfs.model import BuildId, Kind
from buildidfs.upstream import apt, apt_index
from buildidfs.upstream.fetcher import State, Upstreams
from buildidfs.upstream.options import Options
from tests.support.aptmirror import (
    SUITE,
    Signer,
    debug_package,
    mirror,
    signer,
    write_release,
)
from tests.support.elfwriter import DWARF, TEXT_SPLIT, altlink, elf_file
from tests.support.upstreams import plain_files, upstream

if TYPE_CHECKING:
    from collections.abc import Iterator

    from buildidfs.store import Store
    from buildidfs.upstream.fetcher import Fetched

IDS = [BuildId(b"\xd1" + number.to_bytes(19, "big")) for number in range(6)]
COMMON = BuildId(b"\xd2" * 20)
UNKNOWN = BuildId(b"\xd3" * 20)
DEBUG = {each: elf_file([TEXT_SPLIT, DWARF], build_id=each) for each in IDS}
DEBUG[IDS[5]] = elf_file(
    [TEXT_SPLIT, DWARF, altlink(b"/usr/lib/debug/.dwz/x/two.debug", COMMON)], build_id=IDS[5]
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mirror of two packages."""
    work = tmp_path_factory.mktemp("mirror")
    common = elf_file([DWARF], build_id=COMMON)
    debs = [
        debug_package(work, "one-dbgsym", {str(each): DEBUG[each] for each in IDS[:3]}),
        debug_package(
            work,
            "two-dbgsym",
            {str(each): DEBUG[each] for each in IDS[3:]},
            {"usr/lib/debug/.dwz/x/two.debug": common},
        ),
    ]
    mirror(work / "root", debs)
    return work / "root"


def fetched(store: Store, url: str, *ids: BuildId, kind: Kind = Kind.DEBUGINFO) -> list[Fetched]:
    with Upstreams(store, Options((url,), timeout=5, absent_s=0)) as upstreams:
        return [upstreams.fetch(each, kind) for each in ids]


def line(url: str) -> str:
    return f"apt:{url} {SUITE} main arch=amd64"


@pytest.mark.parametrize("form", ["http", "directory", "file", "flat", "flat http"])
def test_debug_files_come_out_of_packages(store: Store, root: Path, form: str) -> None:
    with upstream(plain_files(root)) as server:
        url = {
            "http": line(server.url), "directory": line(str(root)), "file": line(f"file://{root}"),
            "flat": f"apt:{root}", "flat http": f"apt:{server.url} ./",
        }[form]  # fmt: skip
        done = fetched(store, url, *IDS, UNKNOWN)
        packages = [path for path in server.requests if path.endswith(".deb")]
        assert all(server.requests[path] == 1 for path in packages), "each is downloaded once"
        assert len(packages) == (2 if "http" in form else 0)
    assert [each.state for each in done] == [State.FETCHED] * 6 + [State.ABSENT]
    for each in IDS:
        ordinal = store.index.ordinal(each)
        assert ordinal is not None
        artifact = store.index.artifact(ordinal, Kind.DEBUGINFO)
        assert artifact is not None
        with store.open_blob(artifact.digest) as blob:
            assert blob.pread(1 << 20, 0) == DEBUG[each]
    assert store.index.ordinal(COMMON) is not None, "the dwz file comes out of the same package"
    assert list(store.check()) == []


def test_executables_are_in_no_debug_package(store: Store, root: Path) -> None:
    (done,) = fetched(store, line(str(root)), IDS[0], kind=Kind.EXECUTABLE)
    assert done.state is State.ABSENT


def test_lists_are_read_once_for_all_processes(store: Store, root: Path) -> None:
    with upstream(plain_files(root)) as server:
        for _ in range(3):
            fetched(store, line(server.url), UNKNOWN)
        assert sum(count for path, count in server.requests.items() if "Packages" in path) == 1


def test_new_lists_are_read(store: Store, root: Path, tmp_path: Path) -> None:
    work = tmp_path / "mirror"
    mirror(work, [debug_package(tmp_path, "a-dbgsym", {str(IDS[0]): DEBUG[IDS[0]]})])
    assert fetched(store, line(str(work)), IDS[1])[0].state is State.ABSENT
    mirror(work, [debug_package(tmp_path, "b-dbgsym", {str(IDS[1]): DEBUG[IDS[1]]})])
    assert fetched(store, line(str(work)), IDS[1])[0].state is State.FETCHED


def test_lists_of_before_do_while_the_mirror_is_away(store: Store, root: Path) -> None:
    with upstream(plain_files(root)) as server:
        url = line(server.url)
        assert fetched(store, url, IDS[0])[0].state is State.FETCHED
    (known, unknown) = fetched(store, url, IDS[3], UNKNOWN)
    assert (known.state, unknown.state) == (State.UNAVAILABLE, State.ABSENT)


@pytest.fixture
def broken(root: Path, tmp_path: Path) -> Path:
    """A copy of the mirror to damage."""
    import shutil

    return Path(shutil.copytree(root, tmp_path / "broken"))


def test_package_that_is_not_the_one_of_the_list(store: Store, broken: Path) -> None:
    deb = broken / "pool/main/one-dbgsym_1_amd64.deb"
    deb.write_bytes(deb.read_bytes()[:-1] + b"\xff")
    (done,) = fetched(store, line(str(broken)), IDS[0])
    assert (done.state, "hash is not that in its list" in done.why) == (State.UNAVAILABLE, True)


def test_list_that_is_not_the_one_of_the_release(store: Store, broken: Path) -> None:
    listed = broken / f"dists/{SUITE}/main/binary-amd64/Packages.xz"
    listed.write_bytes(listed.read_bytes() + b"\0")
    (done,) = fetched(store, line(str(broken)), IDS[0])
    assert (done.state, "hash is not that in Release" in done.why) == (State.UNAVAILABLE, True)


def test_list_that_is_damaged(store: Store, broken: Path) -> None:
    listed = broken / f"dists/{SUITE}/main/binary-amd64/Packages.xz"
    listed.write_bytes(listed.read_bytes()[:100])
    write_release(broken, [listed])
    (done,) = fetched(store, line(str(broken)), IDS[0])
    assert (done.state, "has no lists of packages" in done.why) == (State.UNAVAILABLE, True)


@pytest.mark.parametrize(
    ("words", "why"),
    [("no-such-suite main", "has no suite"), (f"{SUITE} contrib", "has no list contrib/")],
)
def test_suite_that_is_not_there(store: Store, root: Path, words: str, why: str) -> None:
    (done,) = fetched(store, f"apt:{root} {words} arch=amd64", IDS[0])
    assert (done.state, why in done.why) == (State.UNAVAILABLE, True), done.why


@pytest.fixture(scope="module")
def key() -> Iterator[Signer]:
    with signer("archive@example.org") as made:
        yield made


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("form", ["http", "directory"])
def test_suite_that_is_signed(
    store: Store, broken: Path, key: Signer, form: str, inline: bool
) -> None:
    key.sign(broken, inline=inline)
    with upstream(plain_files(broken)) as server:
        url = server.url if form == "http" else str(broken)
        (done,) = fetched(store, f"{line(url)} signed-by={key.keyring}", IDS[0])
    assert done.state is State.FETCHED, done.why


@pytest.mark.parametrize("inline", [True, False])
def test_suite_that_another_key_signed(
    store: Store, broken: Path, key: Signer, inline: bool
) -> None:
    with signer("other@example.org") as other:
        other.sign(broken, inline=inline)
    (done,) = fetched(store, f"{line(str(broken))} signed-by={key.keyring}", IDS[0])
    assert (done.state, "no key in" in done.why) == (State.UNAVAILABLE, True), done.why


@pytest.mark.parametrize("inline", [True, False])
def test_release_that_was_changed_after_it_was_signed(
    store: Store, broken: Path, key: Signer, inline: bool
) -> None:
    key.sign(broken, inline=inline)
    signed = broken / "dists" / SUITE / ("InRelease" if inline else "Release")
    signed.write_bytes(signed.read_bytes().replace(b"Origin: Test", b"Origin: Evil"))
    (done,) = fetched(store, f"{line(str(broken))} signed-by={key.keyring}", IDS[0])
    assert (done.state, "no key in" in done.why) == (State.UNAVAILABLE, True), done.why


def test_lists_outside_of_the_signed_text_do_not_count(
    store: Store, broken: Path, key: Signer
) -> None:
    key.sign(broken, inline=True)
    listed = broken / f"dists/{SUITE}/main/binary-amd64/Packages.xz"
    listed.write_bytes(listed.read_bytes() + b"\0")
    write_release(broken, [listed])
    place = broken / "dists" / SUITE
    signed = (place / "InRelease").read_bytes()
    (place / "InRelease").write_bytes(signed + (place / "Release").read_bytes())
    (done,) = fetched(store, f"{line(str(broken))} signed-by={key.keyring}", IDS[0])
    assert (done.state, "hash is not that in Release" in done.why) == (State.UNAVAILABLE, True)


def test_suite_without_a_signature(store: Store, broken: Path, key: Signer) -> None:
    (done,) = fetched(store, f"{line(str(broken))} signed-by={key.keyring}", IDS[0])
    assert (done.state, done.why.endswith("has no signature of its Release")) == (
        State.UNAVAILABLE,
        True,
    )


def test_keyring_that_is_not_there(store: Store, broken: Path, key: Signer) -> None:
    key.sign(broken, inline=True)
    (done,) = fetched(store, f"{line(str(broken))} signed-by=/no/such/keyring", IDS[0])
    assert (done.state, "/no/such/keyring" in done.why) == (State.UNAVAILABLE, True)


def test_package_without_the_file_that_it_lists(store: Store, broken: Path) -> None:
    listed = broken / "Packages"
    listed.write_bytes(listed.read_bytes().replace(str(IDS[0]).encode(), str(UNKNOWN).encode()))
    (done,) = fetched(store, f"apt:{broken}", UNKNOWN)
    assert done.state is State.ABSENT


def test_path_that_leads_out_of_the_mirror(store: Store, broken: Path) -> None:
    secret = broken.parent / "secret.deb"
    os.rename(broken / "pool/main/one-dbgsym_1_amd64.deb", secret)
    listed = broken / "Packages"
    path = b"pool/main/one-dbgsym_1_amd64.deb"
    listed.write_bytes(listed.read_bytes().replace(path, b"../secret.deb"))
    (done,) = fetched(store, f"apt:{broken}", IDS[0])
    assert done.state is State.ABSENT


def test_damaged_index_is_made_anew(store: Store, root: Path) -> None:
    fetched(store, line(str(root)), UNKNOWN)
    (path,) = (Path(os.fsdecode(store.path)) / "upstream").glob("apt-*")
    path.write_bytes(b"x" * 100)
    assert fetched(store, line(str(root)), IDS[0])[0].state is State.FETCHED


@pytest.mark.parametrize(
    ("text", "suite"),
    [
        ("apt:https://host/x", apt.Suite("https://host/x/")),
        ("apt:https://host/x/ ./", apt.Suite("https://host/x/")),
        ("apt:/srv s arch=arm64", apt.Suite("/srv/", "s", ("main",), "arm64")),
        (
            "apt:/srv s signed-by=/k arch=i386",
            apt.Suite("/srv/", "s", ("main",), "i386", "/k"),
        ),
        ("apt:/srv s a b arch=i386", apt.Suite("/srv/", "s", ("a", "b"), "i386")),
    ],
)
def test_line_of_a_mirror(text: str, suite: apt.Suite) -> None:
    assert apt.parse(text) == suite


@pytest.mark.parametrize("text", ["apt:", "apt:arch=i386", "apt:ftp://host s", "apt:host"])
def test_line_that_is_none(text: str) -> None:
    with pytest.raises(UsageError, match="not a mirror"):
        apt.parse(text)


@pytest.mark.parametrize("text", ["apt:/srv s signed-by=k", "apt:/srv signed-by=/k"])
def test_keyring_that_cannot_be_used(text: str) -> None:
    with pytest.raises(UsageError, match="signed-by"):
        apt.parse(text)


def test_index_finds_each_build_id(tmp_path: Path) -> None:
    packages = [
        apt_lists.ListedPackage(
            b"pool/%d.deb" % number, bytes([number]) * 32, number, (bytes(each),)
        )
        for number, each in enumerate(IDS)
    ]
    path = os.fsencode(tmp_path / "index")
    for name, age in (("index.1", 7200), ("index.2", 0)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    apt_index.write(path, b"h" * 32, packages)
    left = {each.name for each in tmp_path.iterdir()}
    assert left == {"index", "index.2"}, "drafts of killed processes go after a while"
    with contextlib.closing(apt_index.AptIndex(path)) as index:
        assert index.made_of == b"h" * 32
        for number, each in enumerate(IDS):
            entry = apt_index.Entry(b"pool/%d.deb" % number, bytes([number]) * 32, number)
            assert index.find(each) == entry
        assert index.find(UNKNOWN) is None
