# SPDX-License-Identifier: Apache-2.0
"""What holds for every test: a clean environment, a swept machine, honest skips.

Tests that need root, FUSE or the host's own mount namespace say so with a marker. They are
skipped only where the machine cannot have it; a missing program is a failure, because ``make test``
installs it.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import pytest

from buildidfs.linux import mounts as linux_mounts
from buildidfs.linux import namespaces
from tests.support import mounts
from tests.support.scans import own_namespaces

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from buildidfs.model import NamespaceSet

# Makefile exports the store and the mount point of `make up`, which are the user's own.
_MAKE = ("MAKE", "MFLAGS", "STORE", "MOUNTPOINT")
_FOREIGN = ("DEBUGINFOD_", "BUILDIDFS", "BCC_", "PERF_", "XDG_", "LLVM_", "GDB", *_MAKE)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what this machine or user cannot have, saying what it is."""
    if item.get_closest_marker("root") and os.geteuid() != 0:
        pytest.skip("needs root")
    if item.get_closest_marker("fuse"):
        try:
            os.close(os.open("/dev/fuse", os.O_RDWR))
        except OSError as error:
            pytest.skip(f"/dev/fuse cannot be opened: {error.strerror}")
    if item.get_closest_marker("host") and own_namespaces().mnt != namespaces.initial().mnt:
        pytest.skip("needs the host's own mount namespace, and this is a container")


@pytest.fixture(scope="session")
def scratch() -> Iterator[Path]:
    """A directory for this run, below which tests may mount and attach: it is cleared at the end.

    Other users may pass through it, as a test that changes its user needs.
    """
    mounts.sweep()
    directory = mounts.scratch_directory()
    directory.chmod(0o711)
    yield directory
    left = mounts.leftovers(directory)
    mounts.clear(directory)
    assert not left, f"tests left behind {left}"


@pytest.fixture
def directory(scratch: Path, request: pytest.FixtureRequest) -> Path:
    """A directory of this test's own below `scratch`."""
    # Tests in different files may have the same name.
    path = scratch / request.path.stem / request.node.name.replace("/", "_")
    path.mkdir(parents=True)
    return path


@pytest.fixture
def as_host(monkeypatch: pytest.MonkeyPatch) -> NamespaceSet:
    """Our own namespaces, whatever they are, with our mounts taken for those of the host.

    For tests of what is believed of the host's files: they pass it to a scanner as ``initial``.
    """
    monkeypatch.setattr(linux_mounts, "initial_mountinfo", linux_mounts.mountinfo)
    return own_namespaces()


@pytest.fixture(scope="session", autouse=True)
def _clean_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing of the user's own settings, caches or debuginfod servers reaches a test."""
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ:
            if name.startswith(_FOREIGN):
                patch.delenv(name)
        home = tmp_path_factory.mktemp("home")
        patch.setenv("HOME", str(home))
        patch.setenv("LC_ALL", "C.UTF-8")
        patch.setenv("TERM", "dumb")
        yield


@pytest.fixture(autouse=True)
def _no_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start every test with empty caches: debuginfod clients remember misses for ten minutes."""
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("DEBUGINFOD_CACHE_PATH", str(cache / "debuginfod"))


@pytest.fixture(autouse=True)
def _own_log() -> Iterator[None]:
    """What a test does to the logger of the program is not seen by the next."""
    logger = logging.getLogger("buildidfs")
    before = (logger.handlers[:], logger.level, logger.propagate)
    yield
    logger.handlers[:], logger.level, logger.propagate = before
