# SPDX-License-Identifier: Apache-2.0
"""A mount gives nobody more than they could have had where it was captured, be it bytes or names.

Files are arranged in all ways in which somebody can be kept from them: directories, modes, lists,
copies with the same build ID or the same bytes, chroots, mount namespaces, packages, images and
bundles. Then each of several users reads all that the mount gives them, and asks for what they
know the name of. Who could read a file at its place is tried out there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.clients.tools import run, tool
from tests.support.containers.images import Layout, layer
from tests.support.elf.elfwriter import DWARF, SYMTAB, TEXT, elf_file
from tests.support.elf.programs import build_id_of, sha256
from tests.support.filesystems.sources import deb, entry, tar
from tests.support.harness.callers import ACL_USER, Caller, Walked, Who, calling_all, set_acl
from tests.support.harness.children import cat_program, running
from tests.support.harness.mounts import BuildIdFs

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = [pytest.mark.root, pytest.mark.fuse]

ALICE, BOB, NOBODY, STAFF = 61001, 61002, 65534, 62001
CALLERS = {
    "alice": Who(ALICE, ALICE),
    "bob": Who(BOB, BOB),
    "staff": Who(BOB + 1, BOB + 1, (STAFF,)),
    "nobody": Who(NOBODY, NOBODY),
}
EVERYBODY = frozenset(CALLERS)
OURS = frozenset(("alice",))

Could = Callable[[Caller], bool]


@dataclasses.dataclass(frozen=True)
class Place:
    """A file that was captured, and what is known of its place.

    ``token`` is in the path and nowhere else. ``could`` tries out who can read it there.
    ``at_least`` are those who can say so with the owner, the group and the mode that are shown.
    """

    token: str
    path: str
    build_id: str
    digest: str
    could: Could
    at_least: frozenset[str] = frozenset()
    container: str = ""


@dataclasses.dataclass(frozen=True)
class Inode:
    """Mode, owner and group of a file or directory, and users whom a list names."""

    mode: int
    uid: int = 0
    gid: int = 0
    named: Sequence[tuple[int, int, int]] = ()

    def give_to(self, path: Path) -> None:
        os.chown(path, self.uid, self.gid)
        path.chmod(self.mode)
        if self.named:
            set_acl(path, self.mode, self.named)


PUBLIC = Inode(0o755)
DIRECTORIES = {
    "public": (PUBLIC,),
    "search": (Inode(0o711, BOB, BOB),),
    "home": (Inode(0o700, ALICE, ALICE),),
    "deep": (Inode(0o700, ALICE, ALICE), PUBLIC, PUBLIC),
    "group": (Inode(0o750, ALICE, STAFF),),
    "but-group": (Inode(0o705, 0, STAFF),),
    "root": (Inode(0o700),),
    "listed": (Inode(0o700, ALICE, ALICE, [(ACL_USER, 5, BOB)]),),
}
FILES = {
    "program": Inode(0o755),
    "own": Inode(0o755, ALICE, ALICE),
    "private": Inode(0o600, ALICE, STAFF),
    "group": Inode(0o640, ALICE, STAFF),
    "bobs": Inode(0o700, BOB, BOB),
}
READERS = {
    "program": EVERYBODY, "own": EVERYBODY, "private": OURS,
    "group": OURS | {"staff"}, "bobs": frozenset(("bob",)),
}  # fmt: skip
"""Those who may read a file, in a directory for everybody."""


class Arranged:
    """What is arranged so far, below a directory that everybody can search; closed at the end."""

    def __init__(self, top: Path, buildidfs: BuildIdFs) -> None:
        self.top = top
        self.buildidfs = buildidfs
        self.places: dict[str, Place] = {}
        self.pids: list[int] = []
        self.stack = contextlib.ExitStack()
        self._numbers = itertools.count(1)

    def build_id(self) -> bytes:
        """Another one each time."""
        return b"\xca\x5e" + next(self._numbers).to_bytes(2, "big") + bytes(16)

    def directory(self, name: str, *above: Inode) -> Path:
        """A directory, whose permissions are set by `close`, so that it can be filled before."""
        place = self.top / f"at-{name}"
        place.mkdir()
        made = [place]
        for _ in above[1:]:
            made.append(made[-1] / "below")
            made[-1].mkdir()
        for where, inode in zip(made, above, strict=True):
            inode.give_to(where)
        return made[-1]

    def add(
        self,
        name: str,
        file: Path,
        could: Could,
        at_least: frozenset[str] = frozenset(),
        *,
        path: str = "",
        container: str = "",
    ) -> None:
        """A file that is to be captured as one that was at ``path``, by default where it is."""
        self.places[name] = Place(
            name, path or str(file), build_id_of(file), sha256(file), could, at_least, container
        )


def _reads(path: Path) -> Could:
    return lambda caller: caller.reads(path) == 0


def _elf(path: Path, build_id: bytes, text: str = "") -> Path:
    path.write_bytes(elf_file([TEXT, SYMTAB, DWARF], build_id=build_id) + text.encode())
    return path


# --- arrangements --------------------------------------------------------------------------------


def _trees(to: Arranged) -> None:
    """Each kind of file in each kind of directory."""
    for (above, inodes), (kind, inode) in itertools.product(DIRECTORIES.items(), FILES.items()):
        name = f"{above}-{kind}"
        file = _elf(to.directory(name, *inodes) / f"file-{name}", to.build_id())
        inode.give_to(file)
        at_least = READERS[kind] if above in ("public", "search") else frozenset()
        if above in ("home", "deep") and kind in ("own", "private"):
            at_least = OURS
        to.add(name, file, _reads(file), at_least)
    to.buildidfs("scan", "tree", to.top)


def _copies(to: Arranged) -> None:
    """Somebody knows a build ID, or has the same bytes, and a place of their own."""
    homes = {"forged": "other bytes", "same": ""}
    for kind, text in homes.items():
        for above in ("home", "root", "group"):
            build_id = to.build_id()
            name = f"victim-{kind}-{above}"
            file = _elf(to.directory(name, *DIRECTORIES[above]) / f"file-{name}", build_id)
            os.chown(file, ALICE, STAFF)
            file.chmod(0o755)
            to.add(name, file, _reads(file), OURS if above != "root" else frozenset())
            name = f"copy-{kind}-{above}"
            copy = _elf(to.directory(name, PUBLIC) / f"file-{name}", build_id, text)
            os.chown(copy, BOB, BOB)
            copy.chmod(0o755)
            to.add(name, copy, _reads(copy), EVERYBODY)
            to.buildidfs("scan", "tree", file, copy)
    # One file at two places: a scan knows it when it comes to the second.
    for first, second in (("public", "home"), ("home", "public")):
        one, other = f"linked-{first}-first", f"linked-{second}-second"
        file = to.directory(one, *DIRECTORIES[first]) / f"file-{one}"
        link = to.directory(other, *DIRECTORIES[second]) / f"file-{other}"
        _elf(file, to.build_id())
        os.chown(file, ALICE, ALICE)
        file.chmod(0o755)
        link.hardlink_to(file)
        for name, path, above in ((one, file, first), (other, link, second)):
            to.buildidfs("scan", "tree", path)
            to.add(name, path, _reads(path), EVERYBODY if above == "public" else OURS)
    for above in ("public", "home"):  # under a name that .gnu_debugaltlink sections speak of
        name = f"dwz-{above}"
        directory = to.directory(name, *DIRECTORIES[above]) / ".dwz"
        directory.mkdir()
        file = _elf(directory / f"file-{name}", to.build_id())
        to.add(name, file, _reads(file), EVERYBODY if above == "public" else frozenset())
        to.buildidfs("scan", "tree", file)


def _program(to: Arranged, path: Path) -> Path:
    """A cat with a build ID of its own."""
    data, old = cat_program().read_bytes(), bytes.fromhex(build_id_of(cat_program()))
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, to.build_id().ljust(len(old), b"\0")))
    path.chmod(0o755)
    return path


def _start(to: Arranged, *words: str | Path) -> subprocess.Popen[bytes]:
    child = to.stack.enter_context(running(words))
    to.pids.append(child.pid)
    return child


_AS_ALICE = (f"--reuid={ALICE}", f"--regid={ALICE}", "--clear-groups")
_BIND = 'mount --bind "$1" "$2" && exec "$2/$3"'
_OVERLAY = 'mount -t overlay -o lowerdir="$1:$4" none "$2" && exec "$2/$3"'
_PIVOT = 'mount --bind "$1" "$1" && cd "$1" && pivot_root . . && exec "/$3"'


def _library_tree(root: Path) -> None:
    found = run([tool("ldd"), cat_program()], check=True).out
    for library in (Path(word) for word in found.split() if word.startswith("/")):
        (root / library.parent.relative_to("/")).mkdir(parents=True, exist_ok=True)
        shutil.copy(library, root / library.relative_to("/"))


def _processes(to: Arranged) -> None:
    """Programs that run from what is deleted, in a chroot, in a mount namespace."""
    for above in ("public", "home"):
        name = f"deleted-{above}"
        directory = to.directory(name, *DIRECTORIES[above])
        file = _program(to, directory / f"file-{name}")
        os.chown(file, ALICE, ALICE)
        again = Path(shutil.copy(file, to.top / "copy"))
        _start(to, file)
        file.unlink()
        directory.rmdir()
        directory.mkdir()
        directory.chmod(0o755)
        os.chown(directory, BOB, BOB)
        to.add(name, again, lambda caller: caller.who.uid == ALICE, OURS, path=str(file))
        again.unlink()
    for above in ("public", "root", "home"):
        name = f"chroot-{above}"
        jail = to.directory(name, *DIRECTORIES[above]) / "jail"
        jail.mkdir()
        _library_tree(jail)
        file = _program(to, jail / f"file-{name}")
        _start(to, tool("chroot"), jail, f"/{file.name}")
        at_least = EVERYBODY if above == "public" else frozenset()
        to.add(name, file, _reads(file), at_least, path=f"/{file.name}")
    for above, whose in itertools.product(("public", "home"), ("alice", "root")):
        name = f"bind-{above}-{whose}"
        shown = to.directory(name, *DIRECTORIES[above]) / "shown"
        shown.mkdir()
        file = _program(to, shown / f"file-{name}")
        os.chown(file, ALICE, ALICE)
        point = to.directory(f"point-of-{above}-{whose}", PUBLIC)
        become = (tool("setpriv"), *_AS_ALICE, tool("unshare"), "-Urm")
        unshare = become if whose == "alice" else (tool("unshare"), "-m")
        child = _start(to, *unshare, "sh", "-c", _BIND, "sh", shown, point, file.name)
        at_least = EVERYBODY if above == "public" else OURS
        to.add(
            name, file, _reads(file), at_least,
            path=str(point / file.name), container=_container_of(child.pid),
        )  # fmt: skip
    # An overlay hides the way to its layers.
    empty = to.directory("empty", PUBLIC)
    for whose in ("alice", "root"):
        name = f"overlay-{whose}"
        shown = to.directory(name, *DIRECTORIES["home"]) / "shown"
        shown.mkdir()
        file = _program(to, shown / f"file-{name}")
        os.chown(file, ALICE, ALICE)
        point = to.directory(f"point-of-{name}", PUBLIC)
        become = (tool("setpriv"), *_AS_ALICE, tool("unshare"), "-Urm")
        unshare = become if whose == "alice" else (tool("unshare"), "-m")
        child = _start(to, *unshare, "sh", "-c", _OVERLAY, "sh", shown, point, file.name, empty)
        to.add(
            name, file, _reads(file), OURS,
            path=str(point / file.name), container=_container_of(child.pid),
        )  # fmt: skip
    # What root gives to a container as its root is asked from there, wherever root keeps it.
    for name, mode, at_least in (("pivot", 0o755, EVERYBODY), ("pivot-closed", 0o700, frozenset())):
        rootfs = to.directory(name, *DIRECTORIES["root"]) / "rootfs"
        rootfs.mkdir()
        _library_tree(rootfs)
        inside = rootfs / "inside"
        inside.mkdir()
        file = _program(to, inside / f"file-{name}")
        inside.chmod(mode)
        words = ("sh", "-c", _PIVOT, "sh", rootfs, "", f"inside/{file.name}")
        child = _start(to, tool("unshare"), "-m", *words)
        is_open = mode == 0o755
        to.add(
            name, file, lambda _, is_open=is_open: is_open, at_least,
            path=f"/inside/{file.name}", container=_container_of(child.pid),
        )  # fmt: skip
    to.buildidfs.scan(*to.pids)


def _container_of(pid: int) -> str:
    return f"mnt:{os.stat(f'/proc/{pid}/ns/mnt').st_ino}"


ARCHIVES: dict[str, tuple[tuple[Inode, ...], Inode, frozenset[str]]] = {
    "all": (DIRECTORIES["public"], Inode(0o644), EVERYBODY),
    "mode": (DIRECTORIES["public"], Inode(0o600, ALICE, ALICE), OURS),
    "home": (DIRECTORIES["home"], Inode(0o644, ALICE, ALICE), OURS),
    "group": (DIRECTORIES["public"], Inode(0o640, ALICE, STAFF), OURS | {"staff"}),
    "root": (DIRECTORIES["root"], Inode(0o644), frozenset()),
}


def _archives(to: Arranged) -> None:
    """Packages, images and bundles that are somebody's, with members for all and for one."""
    for name, (above, inode, readers) in ARCHIVES.items():
        directory = to.directory(f"archive-{name}", *above)
        members = []
        for inside, mode, uid in (("open", 0o755, 0), ("closed", 0o600, ALICE)):
            token = f"package-{name}-{inside}"
            file = _elf(to.top / "member", to.build_id())
            members.append((entry(f"./usr/file-{token}", mode=mode, uid=uid), file.read_bytes()))
            could = _reads(directory / "app.deb")
            if inside == "closed":
                could = _both(could, lambda caller: caller.who.uid == ALICE)
            at_least = readers if inside == "open" else readers & OURS
            to.add(
                token, file, could, at_least,
                path=f"/usr/file-{token}", container=f"package:app-{name}-1.all",
            )  # fmt: skip
        control = b"Package: app-%s\nVersion: 1\nArchitecture: all\n" % name.encode()
        (directory / "app.deb").write_bytes(deb(tar(members), control))
        inode.give_to(directory / "app.deb")
        to.buildidfs("scan", "package", directory / "app.deb")
        token = f"image-{name}"
        file = _elf(to.top / "member", to.build_id())
        blob = layer([(entry(f"usr/file-{token}", mode=0o755), file.read_bytes())])
        layout = Layout(directory / "layout")
        layout.image(f"{token}:1", blob)
        inode.give_to(layout.path(blob.digest))
        to.add(
            token, file, _reads(layout.path(blob.digest)), readers,
            path=f"/usr/file-{token}", container=f"image:{token}:1",
        )  # fmt: skip
        to.buildidfs("scan", "image", layout.directory)
        _bundle(to, name, directory, inode, readers)
    (to.top / "member").unlink()


def _bundle(
    to: Arranged, name: str, directory: Path, inode: Inode, readers: frozenset[str]
) -> None:
    """What another store had seen where everybody could read it, and where only root could."""
    elsewhere = BuildIdFs(directory)
    for inside, mode in (("open", 0o755), ("closed", 0o700)):
        token = f"bundle-{name}-{inside}"
        place = to.top / f"at-{token}"
        place.mkdir()
        file = _elf(place / f"file-{token}", to.build_id())
        file.chmod(0o755)
        place.chmod(mode)
        elsewhere("scan", "tree", file)
        could = _reads(directory / "app.bundle") if inside == "open" else lambda _: False
        to.add(token, file, could, readers if inside == "open" else frozenset())
    ids = [to.places[f"bundle-{name}-{inside}"].build_id for inside in ("open", "closed")]
    elsewhere("bundle", *ids, "-o", directory / "app.bundle")
    inode.give_to(directory / "app.bundle")
    to.buildidfs("import", directory / "app.bundle")


def _both(one: Could, other: Could) -> Could:
    return lambda caller: one(caller) and other(caller)


# --- what they get -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Served:
    """A mount of all that, what each user found in it, and who could read what at its place."""

    mount: Path
    places: dict[str, Place]
    callers: dict[str, Caller]
    walked: dict[str, Walked]
    could: dict[tuple[str, str], bool]

    def pairs(self) -> Iterator[tuple[str, Caller, Place]]:
        for (name, caller), place in itertools.product(self.callers.items(), self.places.values()):
            yield name, caller, place


@pytest.fixture(scope="module")
def served(scratch: Path) -> Iterator[Served]:
    """One mount for all arrangements."""
    directory = scratch / "who-may-know"
    top = directory / "places"
    top.mkdir(parents=True)
    for path in (directory, top):
        path.chmod(0o755)
    to = Arranged(top, BuildIdFs(directory))
    with to.stack:
        for arrange in (_trees, _copies, _processes, _archives):
            arrange(to)
        with to.buildidfs.mounted() as mount, calling_all(CALLERS.values()) as everybody:
            callers = dict(zip(CALLERS, everybody, strict=True))
            could = {
                (name, place.token): place.could(caller)
                for name, caller in callers.items()
                for place in to.places.values()
            }
            walked = {name: caller.walks(mount) for name, caller in callers.items()}
            yield Served(mount, to.places, callers, walked, could)
    shutil.rmtree(top)


def test_there_are_many(served: Served) -> None:
    assert len(served.places) >= 60
    private = [place for place in served.places if not served.could["nobody", place]]
    assert len(private) >= 40
    assert len(served.places) - len(private) >= 15


def test_nothing_is_read_that_could_not_be_read_there(served: Served) -> None:
    digests = {
        name: {p.digest for p in served.places.values() if served.could[name, p.token]}
        for name in served.callers
    }
    for name, _, place in served.pairs():
        if place.digest not in digests[name]:
            assert place.digest not in served.walked[name].read, (name, place.token)


def test_no_place_is_told_of_that_could_not_be_read(served: Served) -> None:
    for name, _, place in served.pairs():
        if not served.could[name, place.token]:
            needle = f"file-{place.token}".encode()
            told = [each for each in served.walked[name].told if _names(needle, each)]
            assert not told, (name, place.token)


def _names(needle: bytes, text: bytes) -> bool:
    """Whether a text has that name, and not just one that begins with it."""
    at = text.find(needle)
    while at >= 0:
        if text[at + len(needle) :][:1] in (b"", b"/", b"\n", b"."):
            return True
        at = text.find(needle, at + 1)
    return False


def _spellings(place: Place, mount: Path) -> list[Path]:
    """Names in the mount that tell of a place, for who knows it."""
    file = place.path.rpartition("/")[2]
    names = [
        f"by-path{place.path}", f"by-path{place.path}/{place.build_id}/elf",
        f"by-name/{file}", f"by-name/{file}/{place.build_id}/elf",
        f"perf{place.path}", f"perf{place.path}/{place.build_id}/elf",
    ]  # fmt: skip
    if "/.dwz/" in place.path:
        names.append(f"debug/.dwz/{file}")
    if place.container:
        names.append(f"containers/{place.container}/root{place.path}")
    return [mount / name for name in names]


def test_who_guesses_a_name_learns_nothing(served: Served) -> None:
    """Asked after root has asked, and what everybody may know of: the kernel has one memory."""
    for place in served.places.values():
        for path in _spellings(place, served.mount):
            assert path.exists(), (place.token, path)
        for name, caller in served.callers.items():
            for path in _spellings(place, served.mount):
                answer = caller.reads(path)
                if not served.could[name, place.token]:
                    assert answer == errno.ENOENT, (name, place.token, path)
            os.stat(_spellings(place, served.mount)[0])


@pytest.mark.host  # who could reach what a namespace shows is known only there
def test_what_could_be_read_is_read_and_found(served: Served) -> None:
    for name, caller, place in served.pairs():
        if name not in place.at_least:
            continue
        assert served.could[name, place.token], (name, place.token)
        where = (name, place.token)
        walked = served.walked[name]
        assert place.digest in walked.read, where
        variant = served.mount / place.build_id / "variants" / place.digest
        assert caller.reads(variant) == 0, where
        for path in _spellings(place, served.mount):
            # Of two files with one build ID the other may be the one that is served.
            refused = errno.EACCES if path.name == "elf" and "forged" in place.token else 0
            assert caller.reads(path) in (0, errno.EISDIR, refused), (where, path)
        text = place.path.encode()
        assert any(text in each.splitlines() for each in walked.told), (where, "path")
        assert f"/by-path{place.path}/{place.build_id}".encode() in walked.told, where
        assert any(each.endswith(f"/by-name/file-{place.token}".encode()) for each in walked.told)


def test_what_others_look_for_and_what_runs_is_roots(served: Served) -> None:
    """The files in ``missing``, and those in the store that tell which processes use it."""
    absent = served.mount / "deadbeef"
    assert not absent.exists()
    assert "deadbeef" in os.listdir(served.mount / "missing")
    store = served.mount.parent / "store"
    files = [Path(above, name) for above, _, names in os.walk(store) for name in names]
    assert {"run", "index", "blobs"} <= {path.relative_to(store).parts[0] for path in files}
    for caller in served.callers.values():
        assert caller.reads(served.mount / "missing/deadbeef") == errno.EACCES
        with pytest.raises(PermissionError):
            caller.lists(served.mount / "missing")
        assert {caller.reads(path) for path in files} == {errno.EACCES}


def test_root_is_told_of_all(served: Served) -> None:
    for place in served.places.values():
        text = (served.mount / place.build_id / "path").read_text()
        assert place.path in text.splitlines(), place.token


def test_a_private_bundle_that_is_mounted(scratch: Path) -> None:
    """Its files are for those who may read the bundle."""
    directory = scratch / "who-may-mount"
    directory.mkdir()
    directory.chmod(0o755)
    file = _elf(directory / "file", b"\xca\x5e" + bytes(18))
    buildidfs = BuildIdFs(directory)
    buildidfs("scan", "tree", file)
    bundle = directory / "app.bundle"
    buildidfs("bundle", build_id_of(file), "-o", bundle)
    assert bundle.stat().st_mode & 0o777 == 0o600
    for mode, readers in ((0o600, OURS), (0o644, EVERYBODY)):
        os.chown(bundle, ALICE, ALICE)
        bundle.chmod(mode)
        with (
            buildidfs.mounted("--bundle", bundle) as mount,
            calling_all(CALLERS.values()) as everybody,
        ):
            for name, caller in zip(CALLERS, everybody, strict=True):
                could = caller.reads(bundle) == 0
                assert could == (name in readers)
                assert (caller.reads(mount / build_id_of(file) / "elf") == 0) == could, name
                assert (str(file).encode() in _told(caller, mount)) == could, name


def _told(caller: Caller, mount: Path) -> bytes:
    return b"\n".join(sorted(caller.walks(mount).told))
