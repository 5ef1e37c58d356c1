# SPDX-License-Identifier: Apache-2.0
"""Programs that live for a millisecond, each with its own filesystem, and who still has them.

An item is an executable and a shared object that no machine has seen before, on a filesystem of
their own in a mount namespace of their own; both are destroyed when the program ends. `ShortLife`
makes items, runs them (shortlife.c) and remembers build IDs and digests; `compare` looks for them
in a store, `compare_perf_cache` in what perf keeps.

Images are copies of one another but for build ID and payload (shortlifefiles.py), so consecutive
ones have equal inode numbers, times and sizes, as images from one build system do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from buildidfs.model import BuildId, Digest, Kind
from buildidfs.store import Store
from tests.support.clients.tools import Argument, run, tool
from tests.support.containers.shortlifefiles import (
    Copy,
    make_image,
    needed,
    templates,
    write_bundle,
)
from tests.support.harness.mounts import loop_devices
from tests.support.harness.waiting import until

CONFIGS = ("host", "tmpfs", "overlay", "loop-ext4", "squashfs", "crun")
"""Where items live. ``host``: a directory of the host's own filesystem, deleted after the run."""

_LASTING = 600.0
_IMAGES = ("loop-ext4", "squashfs")
_SOURCE = Path(__file__).with_suffix(".c")


class _Names(NamedTuple):
    """Where the items of one run are made, and the cgroup of its containers."""

    place: Path
    cgroup: str


@dataclasses.dataclass
class Expected:
    """What ran: the SHA-256 (hex) of each file by its build ID (hex).

    ``seconds`` is the time from the first start to the last end.
    """

    executables: dict[str, str] = dataclasses.field(default_factory=dict)
    shared_objects: dict[str, str] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0

    @property
    def files(self) -> dict[str, str]:
        """Both kinds together."""
        return self.executables | self.shared_objects

    def add(self, other: Expected) -> None:
        """Expect those, too."""
        self.executables |= other.executables
        self.shared_objects |= other.shared_objects


@dataclasses.dataclass(frozen=True)
class Result:
    """What is there of ``total`` items: whole executables and shared objects.

    ``wrong_bytes`` counts files under an expected build ID whose bytes are not those that ran.
    ``lost`` are the build IDs of which there is nothing.
    """

    exe_captured: int
    so_captured: int
    wrong_bytes: int
    total: int
    lost: tuple[str, ...] = ()

    @property
    def exe_percent(self) -> float:
        """Share of the executables that were captured, per cent."""
        return 100 * self.exe_captured / self.total

    @property
    def so_percent(self) -> float:
        """Share of the shared objects that were captured, per cent."""
        return 100 * self.so_captured / self.total

    @property
    def complete(self) -> bool:
        """Whether everything was captured, and nothing wrongly."""
        return not self.lost and not self.wrong_bytes

    def __str__(self) -> str:
        return (
            f"exe {self.exe_captured}/{self.total}, so {self.so_captured}/{self.total}, "
            f"wrong {self.wrong_bytes}"
        )


class ShortLife:
    """Makes and runs items of one size below a directory that `close` deletes.

    ``padding`` is how many bytes of random data each file has besides its code. A context manager.
    """

    def __init__(self, directory: Path, padding: int = 0) -> None:
        self._directory = directory
        directory.mkdir(parents=True)
        self._launcher = directory / "launcher"
        run([tool("gcc"), "-O2", "-w", "-o", self._launcher, _SOURCE], check=True)
        self._exe, self._library = templates(directory, padding)
        self._libraries = needed(directory / "exe")
        base = directory / "base"
        for library in self._libraries:
            place = base / library[1:]
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, place)
        for name in ("proc", "dev"):
            (base / name).mkdir()
        self._images: dict[str, bytes] = {}

    def __enter__(self) -> ShortLife:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Delete everything; fails if a loop device stays attached to a deleted image."""
        try:
            # The last to have one of the files open keeps the device.
            until(lambda: not loop_devices(self._directory), "release of the loop devices", 60)
        finally:
            for device in loop_devices(self._directory):
                run([tool("losetup"), "-d", device])
            shutil.rmtree(self._directory, ignore_errors=True)

    def run(
        self,
        config: str,
        items: int,
        concurrency: int = 1,
        life: float = 0.001,
        under: Sequence[Argument] = (),
    ) -> Expected:
        """Make that many items, run them, ``concurrency`` at a time, and delete them.

        ``life`` is how long each lives, in seconds; ``under`` a command that runs the command at
        its end (a profiler). Raises `RuntimeError` if an item does not run.
        """
        with self._made(config, items, life) as (expected, names):
            argv = [*under, *self._launching(config, concurrency, life, names, items)]
            expected.seconds = _launch(argv, timeout=120 + items * (1 + life))
        return expected

    @contextlib.contextmanager
    def lasting(self, config: str, items: int) -> Iterator[Expected]:
        """Items that all run until the end of the block. Not for ``crun``."""
        with self._made(config, items, _LASTING) as (expected, names):
            argv = self._launching(config, items, _LASTING, names, items)
            launcher = subprocess.Popen([os.fspath(word) for word in argv])
            try:
                until(lambda: _running(launcher.pid) == items, "all items to run")
                yield expected
            finally:
                # Its children have asked to be killed with it.
                launcher.kill()
                launcher.wait(30)

    @contextlib.contextmanager
    def _made(self, config: str, items: int, life: float) -> Iterator[tuple[Expected, _Names]]:
        token = secrets.token_hex(4)
        names = _Names(self._directory / f"items-{token}", f"buildidfs-{os.getpid()}-{token}")
        assert config in CONFIGS, config
        expected = Expected()
        try:
            for number in range(items):
                expected.add(self._make(names.place / str(number), config))
                if config == "crun":
                    cgroup = f"/{names.cgroup}/{number}"
                    write_bundle(names.place / str(number), cgroup, _microseconds(life))
            yield expected, names
        finally:
            _remove_cgroups(names.cgroup)
            shutil.rmtree(names.place, ignore_errors=True)

    def _launching(
        self, config: str, concurrency: int, life: float, names: _Names, items: int
    ) -> list[Argument]:
        crun = tool("crun") if config == "crun" else "none"
        return [
            self._launcher, config, str(concurrency), _microseconds(life), names.place,
            str(items), crun, names.cgroup, *self._libraries,
        ]  # fmt: skip

    def write(self, executable: Path, library: Path) -> Expected:
        """Make one item's files at these paths and run nothing; they belong side by side."""
        copies = self._exe.copy(), self._library.copy()
        for path, copy in zip((executable, library), copies, strict=True):
            path.write_bytes(copy.content)
            path.chmod(0o755)
        return _expecting(*copies)

    def _make(self, place: Path, config: str) -> Expected:
        for name in ("content", "root", "extra"):
            (place / name).mkdir(parents=True)
        if config not in _IMAGES:
            return self.write(place / "content/exe", place / "content/libitem.so")
        copies = self._exe.copy(), self._library.copy()
        image = self._image(config)
        for template, copy in zip((self._exe, self._library), copies, strict=True):
            image = template.replaced(image, copy.marks)
        (place / "image").write_bytes(image)
        return _expecting(*copies)

    def _image(self, config: str) -> bytes:
        """An image with the templates in it, and empty files to mount the host's libraries on."""
        if config not in self._images:
            content, image = self._directory / "content", self._directory / "image"
            content.mkdir()
            (content / "exe").write_bytes(self._exe.content)
            (content / "libitem.so").write_bytes(self._library.content)
            for library in self._libraries:
                (content / library[1:]).parent.mkdir(parents=True, exist_ok=True)
                (content / library[1:]).touch()
            for path in content.rglob("*"):
                path.chmod(0o755)
            make_image(config, content, image)
            self._images[config] = image.read_bytes()
            image.unlink()
            shutil.rmtree(content)
        return self._images[config]


def _expecting(exe: Copy, library: Copy) -> Expected:
    return Expected({exe.build_id: exe.sha256}, {library.build_id: library.sha256})


def _remove_cgroups(name: str) -> None:
    """Kill the containers and remove the cgroups that are left where crun itself was killed."""
    for top in (Path("/sys/fs/cgroup", name), Path("/sys/fs/cgroup/unified", name)):
        if top.exists():
            (top / "cgroup.kill").write_text("1")
            until(partial(_removed, top), f"the end of {top}")


def _removed(top: Path) -> bool:
    for cgroup in (*top.glob("*/"), top):
        # Busy until the last process in it is reaped.
        with contextlib.suppress(OSError):
            cgroup.rmdir()
    return not top.exists()


def _microseconds(seconds: float) -> str:
    return str(round(seconds * 1e6))


def _running(launcher: int) -> int:
    """How many children of the launcher have mapped their shared object."""
    count = 0
    for process in Path("/proc").glob("[0-9]*"):
        # Processes come and go; some are closed even to root.
        with contextlib.suppress(OSError):
            parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
            count += int(parent) == launcher and "/libitem.so" in (process / "maps").read_text()
    return count


def _launch(argv: Sequence[Argument], timeout: float) -> float:
    """Run the launcher; returns the seconds it measured."""
    with subprocess.Popen(
        [os.fspath(word) for word in argv],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            # Its children have asked to be killed with it.
            process.kill()
            raise
    if process.returncode:
        raise RuntimeError(f"items did not run: {err.decode(errors='replace').strip()[-500:]}")
    return int(out) / 1e9


def compare(store: Path, expected: Expected) -> Result:
    """Look for everything that ran in a store, and read the bytes of all that is there."""
    with Store.open(store, read_only=True) as opened:
        return _compare(expected, lambda build_id: _stored(opened, build_id))


def compare_perf_cache(cache: Path, expected: Expected) -> Result:
    """Look for everything that ran in perf's build ID cache (``~/.debug``)."""

    def find(build_id: str) -> Iterator[str]:
        for path in (cache / ".build-id" / build_id[:2] / build_id[2:]).glob("elf"):
            yield hashlib.sha256(path.read_bytes()).hexdigest()

    return _compare(expected, find)


def _compare(expected: Expected, find: Callable[[str], Iterator[str]]) -> Result:
    found = {build_id: list(find(build_id)) for build_id in expected.files}
    wrong = sum(
        digest != right for build_id, right in expected.files.items() for digest in found[build_id]
    )

    def count(files: Mapping[str, str]) -> int:
        return sum(right in found[build_id] for build_id, right in files.items())

    return Result(
        count(expected.executables),
        count(expected.shared_objects),
        wrong,
        len(expected.executables),
        tuple(build_id for build_id, digests in found.items() if not digests),
    )


def _stored(store: Store, build_id: str) -> Iterator[str]:
    """The SHA-256 of all bytes a store has under a build ID, whatever it calls them."""
    ordinal = store.index.ordinal(BuildId.from_hex(build_id))
    if ordinal is None:
        return
    for digest in {one.digest for kind in Kind for one in store.index.variants(ordinal, kind)}:
        yield _read(store, digest)


def _read(store: Store, digest: Digest) -> str:
    with store.open_blob(digest) as blob:
        return blob.computed().hex()
