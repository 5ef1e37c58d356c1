# SPDX-License-Identifier: Apache-2.0
"""What holds for every test: a clean environment, a swept machine, honest skips.

Tests that need root, FUSE or the host's own mount namespace say so with a marker. They are
skipped only where the machine cannot have it; a missing program is a failure, because ``make test``
installs it. ``make test`` runs them in several processes (`tests.support.harness.distribution`).
"""

from __future__ import annotations

import compileall
import contextlib
import gc
import itertools
import logging
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from buildidfs.linux import mounts as linux_mounts
from buildidfs.linux import namespaces
from tests.support.clients.commands import ROOT
from tests.support.containers.imitating import sweep_groups
from tests.support.harness import children, mounts, quiet
from tests.support.harness.scans import own_namespaces

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from buildidfs.model import NamespaceSet

# Makefile exports the store and the mount point of `make up`; all of these are the user's own.
_MAKE = ("MAKE", "MFLAGS", "STORE", "MOUNTPOINT", "PREFIX")
_FOREIGN = ("DEBUGINFOD_", "BUILDIDFS", "BCC_", "PERF_", "XDG_", "LLVM_", "GDB", *_MAKE)

# Each commit of a store waits for its disk several times, and memory does not let it wait.
_MEMORY = Path("/dev/shm")
_MEMORY_BYTES = 2 << 30
_TURNS = pytest.StashKey[Path]()


def pytest_configure(config: pytest.Config) -> None:
    """Let Python keep the bytecode of modules; keep ``tmp_path`` in memory if there is room.

    Otherwise each worker would rewrite the assertions of all modules, and each of the thousands of
    commands would compile the program. ``--basetemp`` chooses another place for ``tmp_path``.
    """
    if sys.dont_write_bytecode:
        sys.dont_write_bytecode = False
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        # A test under another umask would make directories that other users cannot read.
        compileall.compile_dir(ROOT / "buildidfs", quiet=2)
    with contextlib.suppress(OSError):
        room = shutil.disk_usage(_MEMORY).free >= _MEMORY_BYTES
        if room and config.option.basetemp is None and os.access(_MEMORY, os.W_OK):
            os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return the number of workers for ``-n auto``."""
    from tests.support.harness.distribution import workers

    return workers()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker where the scheduler looks for the tests that take turns."""
    from tests.support.harness import distribution

    place = node.config.stash.get(_TURNS, None)
    if place is None:
        place = node.config.stash[_TURNS] = Path(tempfile.mkdtemp()) / "turns"
    node.workerinput[distribution.PLACE] = str(place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Return the scheduler of ``--dist loadscope``; the others are those of xdist."""
    if config.getoption("dist") != "loadscope":
        return None
    from tests.support.harness.distribution import ByModule

    return ByModule(config, log, config.stash[_TURNS])


def pytest_sessionstart(session: pytest.Session) -> None:
    """Before the workers of a first whole run start, rewrite the assertions of all tests once.

    pytest keeps the result beside the modules. Without it each worker does this when it collects,
    for half of its time.
    """
    is_whole = session.config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if is_whole and getattr(session.config.option, "numprocesses", None):
        from tests.support.harness import distribution

        root = session.config.rootpath
        distribution.rewrite_assertions(root / each for each in session.config.getini("testpaths"))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove what the workers wrote."""
    if _TURNS in config.stash:
        shutil.rmtree(config.stash[_TURNS].parent)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector from going through what is imported and collected, then and later.

    These are a million objects, of which hardly one is garbage.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the tests in a worker."""
    if hasattr(config, "workerinput"):
        from tests.support.harness import distribution

        distribution.prepare(items, Path(config.workerinput[distribution.PLACE]))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what this machine or user cannot have, saying what it is; wait for a quiet host."""
    if item.get_closest_marker("root") and os.geteuid() != 0:
        pytest.skip("needs root")
    if item.get_closest_marker("fuse"):
        try:
            os.close(os.open("/dev/fuse", os.O_RDWR))
        except OSError as error:
            pytest.skip(f"/dev/fuse cannot be opened: {error.strerror}")
    if item.get_closest_marker("host") and own_namespaces().mnt != namespaces.initial().mnt:
        pytest.skip("needs the host's own mount namespace, and this is a container")
    quiet.HOST.enter(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None]:
    """End the processes that a test has started if it fails; those of its fixtures stay."""
    before = children.pids()
    try:
        yield
    except BaseException:
        children.end_others(before)
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Name the watches of others beside which a test failed."""
    report = yield
    quiet.explain(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, None, None]:
    """Let others watch the host when the fixtures of the test have ended."""
    try:
        yield
    finally:
        quiet.HOST.leave(nextitem)


@pytest.fixture(scope="session")
def scratch() -> Iterator[Path]:
    """A directory of this process, below which tests may mount and attach, cleared at the end.

    It is on a disk as a rule, unlike ``tmp_path``. Other users may pass through it, as a test that
    changes its user needs.
    """
    mounts.sweep()
    sweep_groups()
    directory = mounts.scratch_directory()
    directory.chmod(0o711)
    yield directory
    left = mounts.leftovers(directory)
    mounts.clear(directory)
    assert not left, f"tests left behind {left}"


@pytest.fixture
def directory(scratch: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A directory of this test's own below `scratch`.

    Its files go with the test: to remove those of all tests at the end takes half a minute, once
    they have reached the disk.
    """
    # Tests in different files may have the same name.
    path = scratch / request.path.stem / request.node.name.replace("/", "_")
    path.mkdir(parents=True)
    yield path
    if not mounts.leftovers(path):  # else `scratch` tells of them
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def as_host(monkeypatch: pytest.MonkeyPatch) -> NamespaceSet:
    """Our own namespaces, whatever they are, with our mounts taken for those of the host.

    For tests of what is believed of the host's files: they pass it to a scanner as ``initial``.
    """
    monkeypatch.setattr(linux_mounts, "initial_mountinfo", linux_mounts.mountinfo)
    return own_namespaces()


@pytest.fixture(scope="session", autouse=True)
def _clean_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing of the user's own settings, caches or debuginfod servers reaches a test.

    A shell without job control ignores SIGINT for what it runs in the background, and programs
    would inherit this: Ctrl-C would not end them.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ:
            if name.startswith(_FOREIGN):
                patch.delenv(name)
        home = tmp_path_factory.mktemp("home")
        patch.setenv("HOME", str(home))
        patch.setenv("LC_ALL", "C.UTF-8")
        patch.setenv("TERM", "dumb")
        yield


@pytest.fixture(scope="session")
def _caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Names for directories that do not exist yet."""
    directory = tmp_path_factory.mktemp("caches")
    return (directory / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def _no_cache(_caches: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start every test with empty caches: debuginfod clients remember misses for ten minutes."""
    cache = next(_caches)
    cache.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("DEBUGINFOD_CACHE_PATH", str(cache / "debuginfod"))
    yield
    shutil.rmtree(cache, ignore_errors=True)


@pytest.fixture(autouse=True)
def _own_log() -> Iterator[None]:
    """What a test does to the logger of the program is not seen by the next."""
    logger = logging.getLogger("buildidfs")
    before = (logger.handlers[:], logger.level, logger.propagate)
    yield
    logger.handlers[:], logger.level, logger.propagate = before
