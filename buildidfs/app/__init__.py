# SPDX-License-Identifier: Apache-2.0
"""The composition root: the one place where scanners, ingest, store and mount are put together.

Each function is what one command does, for those who call it from Python.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from buildidfs.capture.base import Found, Unreadable
    from buildidfs.capture.unresponsive.as_owner import AsOwner
    from buildidfs.config import Settings
    from buildidfs.ingest import Summary
    from buildidfs.model import Absence, BuildId, Origin
    from buildidfs.store import Store

    Progress = Callable[[int, str], None]


def scan_processes(
    store: Store,
    settings: Settings,
    *,
    pids: Sequence[int] | None = None,
    containers: Sequence[str] | None = None,
    containers_only: bool = False,
    progress: Progress | None = None,
) -> Summary:
    """Capture what the running processes have mapped, and the running kernel's symbols.

    ``containers`` are labels, or beginnings of container IDs. The kernel is part of a scan of
    everything only. Raises `UsageError` for a container that is not there, `StoreFull`.
    """
    found = in_processes(
        store, settings, pids=pids, containers=containers, containers_only=containers_only
    )
    return _ingest(store, found, progress)


def in_processes(
    store: Store,
    settings: Settings,
    *,
    pids: Sequence[int] | None = None,
    containers: Sequence[str] | None = None,
    containers_only: bool = False,
) -> Iterator[Found]:
    """The files that `scan_processes` captures, for callers that want only some of them."""
    from buildidfs.capture.process.process import out_of_sight
    from buildidfs.capture.process.scanner import ProcScanner
    from buildidfs.capture.scan.kernel import KernelScanner
    from buildidfs.ingest import StoreMemo

    memo = StoreMemo(store)
    if pids is None:
        yield from out_of_sight()
    with as_owner(settings) as reads_as_owner:
        yield from ProcScanner(
            memo,
            pids=pids,
            containers=containers,
            containers_only=containers_only,
            container_namespaces=settings.container.namespaces,
            as_owner=reads_as_owner,
        )
    if pids is None and containers is None and not containers_only:
        yield from KernelScanner(memo, container_namespaces=settings.container.namespaces)


def as_owner(settings: Settings) -> AbstractContextManager[AsOwner | None]:
    """What reads files on FUSE filesystems of other users, if the settings want that."""
    if not settings.capture.fuse_as_owner:
        from contextlib import nullcontext

        return nullcontext()
    from buildidfs.capture.unresponsive.as_owner import AsOwner

    return AsOwner()


def scan_tree(
    store: Store, settings: Settings, paths: Sequence[bytes], *, progress: Progress | None = None
) -> Summary:
    """Capture the ELF files below ``paths``; raises `StoreFull`."""
    from buildidfs.capture.scan.tree import TreeScanner
    from buildidfs.ingest import StoreMemo

    scanner = TreeScanner(
        StoreMemo(store), paths, container_namespaces=settings.container.namespaces
    )
    return _ingest(store, scanner, progress)


def identify_tree(
    paths: Iterable[bytes],
) -> Iterator[tuple[bytes, BuildId | Absence | Unreadable]]:
    """The build ID of every regular file below ``paths``, without a store."""
    from buildidfs.capture.scan import tree

    return tree.identify_tree(paths)


def believe(store: Store, settings: Settings) -> None:
    """Let the operator's rules decide how far what a store captures from now on is believed."""
    if settings.trust.rules:
        from buildidfs.ingest.trust import judge

        store.believe(judge(settings.trust.rules))


def name_images(store: Store) -> None:
    """Let a store find out from the engines of this host what images containers are of."""

    def image_of(origin: Origin) -> str:
        from buildidfs.capture.origin import (
            container_images,  # which is not needed before there is one
        )

        return container_images.image_of(origin)

    store.name_images(image_of)


def _ingest(store: Store, found: Iterable[Found], progress: Progress | None) -> Summary:
    from buildidfs.ingest import Ingest

    return Ingest(store).run(found, progress)


def mount(
    store_path: str | os.PathLike[str],
    mountpoint: str,
    *,
    options: Sequence[str] = (),
    gdb_scripts: str = "zero",
    list_all: bool = False,
    bundle: bool = False,
    foreground: bool = False,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Mount the store; returns when it can be read, or, in the foreground, when it is unmounted.

    With ``bundle`` it is one that ``store_path`` leads to. In the foreground ``ready`` is called
    when it can be read. Raises `MountError`, `StoreMissing`, `StoreVersionError`.
    """
    from buildidfs.mount import daemonize
    from buildidfs.mount import options as mount_options

    chosen = mount_options.parse(
        store_path, mountpoint, options, gdb_scripts, list_all=list_all, bundle=bundle
    )
    if foreground:
        from buildidfs.mount import session

        session.run(chosen, ready)
    else:
        daemonize.start(chosen)


def unmount(mountpoint: str) -> None:
    """Take a mount of ours away; raises `MountError`."""
    import os

    from buildidfs.mount import mountpoint as mount_mountpoint

    mount_mountpoint.unmount(os.fsencode(os.path.abspath(mountpoint)))
