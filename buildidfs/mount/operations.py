# SPDX-License-Identifier: Apache-2.0
"""Requests of the kernel, answered from the view: numbers to attributes, bytes and errnos.

There is no table of inodes: the number of a node contains all data. `Operations` keeps an entry for
each open file, and for each open directory of a viewer who may not see everything (`open_files`),
and the names that the kernel caches as absent (`invalidate.Absences`).

An exception other than `FUSEError` would end pyfuse3's main loop, and the mount for all users. So
every handler goes through `_answering`, or, where a microsecond counts, catches everything itself.

Answers are filled into reused objects. That is safe because pyfuse3 sends the reply before other
code can run; a handler must not await between filling and returning.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import itertools
import logging
import mmap
import os
import sys
import time
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import pyfuse3
from pyfuse3 import FUSEError

from buildidfs.errors import ArtifactMissing, BuildIdFsError, IntegrityError, RemoteError
from buildidfs.linux import procfs
from buildidfs.log import log_once
from buildidfs.mount.open_files import DirHandles, OpenFiles, is_text
from buildidfs.names import MAX_NAME
from buildidfs.shares import Quota, of_user
from buildidfs.view import (
    PUBLIC,
    Keep,
    NeedsReading,
    NeedsRequest,
    blank,
    is_path_text,
    is_place,
    is_wanted,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence

    from pyfuse3 import EntryAttributes, FileInfo, ReaddirToken, RequestContext, StatvfsData

    from buildidfs.model import BuildId, Kind
    from buildidfs.mount.invalidate import Absences
    from buildidfs.mount.loop import PlainLoop
    from buildidfs.view import Attributes, View, Viewer

    Fetch = Callable[[BuildId, Kind], object]

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger(__name__)

_IN_FULL = 64
"""The number of entries at the start of a directory that are listed with their attributes: all of a
small one. The rest of a large directory is listed as names, because a reader of all build IDs
rarely needs more.
"""

_IN_FULL_REPLIES = 64
"""Replies with attributes after a lookup in the directory that was listed last: ``ls -l`` needs the
attributes, and a lookup of each entry takes three times as long.
"""

_PAGE = 256
"""The number of entries that are selected at a time for a viewer who may not see all."""

_MOST_WAITS = 48
"""Opens that wait for files at the same time: fewer than the workers of pyfuse3 (99), to leave some
for other requests.
"""

_ANNOUNCED, _PRIVATE = Keep.ANNOUNCED, Keep.PRIVATE
_READ_SIZE = 1 << 20

UNKNOWN = b"?"
_REMEMBERED_S = 1.0
_HUGE_PAGE = 2 << 20
_RESOURCE_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def errno_of(error: Exception) -> int:
    """Return the errno for an error; unexpected errors are logged and become EIO.

    A missing node is ESTALE: the kernel then looks the name up again, and if that fails too,
    reports ENOENT.
    """
    if isinstance(error, FUSEError):
        return error.errno
    if isinstance(error, OSError) and error.errno:
        return error.errno
    if isinstance(error, ArtifactMissing):
        return errno.ESTALE
    if isinstance(error, RemoteError):
        # `note_failure` has logged it; the bucket may have the file, so this is not an absence.
        return errno.EIO
    if isinstance(error, IntegrityError):
        log_once(log, logging.ERROR, str(error))
        return errno.ESTALE
    if isinstance(error, BuildIdFsError):
        log.error("%s", error)
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno in _RESOURCE_ERRNOS:
            return cause.errno
        return errno.EIO
    log.error("a request failed, which is a fault of this program", exc_info=error)
    return errno.EIO


def refusal(error: Exception) -> FUSEError:
    """Return the exception that a handler raises for an error; see `errno_of`."""
    return error if isinstance(error, FUSEError) else FUSEError(errno_of(error))


def _answering(
    handler: Callable[Concatenate[Any, P], T],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Make a handler that pyfuse3 can await, and that raises only `FUSEError`."""

    async def answer(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return handler(self, *args, **kwargs)
        except Exception as error:  # any other exception would end the mount of all its users
            raise refusal(error) from None

    return functools.update_wrapper(answer, handler)


async def _refuse(*args: object) -> Any:
    raise FUSEError(errno.EROFS)


_REFUSED: Any = _refuse
"""For requests that change files. The kernel sends none to a read-only mount."""


class Operations(pyfuse3.Operations):
    """The handlers. Missing handlers answer ENOSYS once, and the kernel does not ask again: flush,
    access, fsync, poll.
    """

    supports_dot_lookup = False
    enable_writeback_cache = False
    enable_acl = False

    def __init__(
        self,
        view: View,
        loop: PlainLoop,
        absences: Absences,
        store_path: bytes,
        *,
        list_all: bool = True,
        fetch: Fetch | None = None,
    ) -> None:
        """``store_path`` is where statfs(2) finds the free space. Without ``list_all``, viewers
        other than root and the server's user see only entries that lead to files they may read.
        ``fetch`` takes a build ID and a kind, and gets the missing file within a limited time.
        """
        self._fetch = fetch
        self._waits = Quota(_MOST_WAITS)
        self._view = view
        self._loop = loop
        self._absences = absences
        self._store_path = store_path
        self._files = OpenFiles(view, absences.limits, os.geteuid())
        self._buffer = huge_buffer(_READ_SIZE)
        self._lasting = Replies(view, FOREVER_S)
        self._fleeting = Replies(view, FLEETING_S)
        self._unkept = Replies(view, 0.0)
        self._replies = {
            Keep.ANNOUNCED: self._lasting,
            Keep.BRIEFLY: self._fleeting,
            Keep.NEVER: self._unkept,
            Keep.PRIVATE: self._unkept,
        }
        self._callers = Callers()
        self._misses = view.misses
        self._names_only = NamesOnly.probe()
        self._directories = DirHandles(absences.limits, everything=list_all, own=os.geteuid())
        self._listed = 0  # the directory that was listed last
        self._wanted = 0  # remaining replies with attributes for that directory
        self._file = pyfuse3.FileInfo(keep_cache=True)
        self._absent = pyfuse3.EntryAttributes()
        self._absent.st_ino = 0
        self._absent.entry_timeout = absences.limits.absence_s

    # --- names and attributes --------------------------------------------------------------

    async def lookup(self, parent: int, name: bytes, ctx: RequestContext) -> EntryAttributes:
        absences = self._absences
        try:
            while True:
                moment = absences.moment
                node, keep = self._view.lookup(parent, name)
                if node:
                    if keep is _PRIVATE:
                        await self._require_knowing(parent, name, node, ctx)
                    elif parent == self._listed:
                        self._wanted = _IN_FULL_REPLIES
                    return self._replies[keep].of(node)
                if len(name) > MAX_NAME:  # the kernel lets 1024 bytes pass
                    raise FUSEError(errno.ENAMETOOLONG)
                log.debug("%s: not there, in inode %d, for pid %d", name, parent, ctx.pid)
                self._misses.note(parent, name, self._callers.name(ctx.pid), of_user(ctx.uid))
                if keep is not _ANNOUNCED or not absences.add(parent, name):
                    raise FUSEError(errno.ENOENT)
                if absences.moment == moment:
                    return self._absent
                # A commit came in between, and may have added the name.
                absences.discard(parent, name)
        except NeedsRequest:
            return await self._lookup_remotely(parent, name)
        except NeedsReading:
            return await self._lookup_slowly(parent, name, ctx)
        except Exception as error:
            raise refusal(error) from None

    async def _lookup_remotely(self, parent: int, name: bytes) -> EntryAttributes:
        """Look up an entry that a bucket may have.

        The kernel may not cache that an entry is absent, because another host may add it.
        """
        try:
            node = await self._loop.in_remote_thread(self._view.lookup_slowly, parent, name)
            log.debug("%s: %s the fleet", name, "found in" if node else "not in")
            if not node:
                raise FUSEError(errno.ENOENT)
            return self._fleeting.of(node)
        except Exception as error:
            raise refusal(error) from None

    async def _lookup_slowly(
        self, parent: int, name: bytes, ctx: RequestContext
    ) -> EntryAttributes:
        """Look up an entry for which a file has to be read, for viewers who may read that file.

        The kernel may not cache the entry, because no commit announces that it leads elsewhere.
        """
        try:
            node = await self._loop.in_slow_thread(self._view.lookup_slowly, parent, name)
            if not node:
                raise FUSEError(errno.ENOENT)
            viewer, shown = self._directories.viewer(ctx), self._view.attributes(node)
            if viewer is not None and not viewer.may_read(shown.mode, shown.uid, shown.gid):
                raise FUSEError(errno.ENOENT)
            return self._unkept.of(node)
        except Exception as error:
            raise refusal(error) from None

    async def _require_knowing(
        self, parent: int, name: bytes, node: int, ctx: RequestContext
    ) -> None:
        """Raise `FUSEError` (ENOENT) unless the caller may know of an entry that shows where a file
        was seen. The kernel may not cache it, because it caches names for all users.
        """
        if self._directories.sees_all(ctx):
            return
        viewer = self._directories.viewer(ctx) or PUBLIC
        known = self._view.may_know
        if not await self._loop.in_slow_thread(known, parent, name, node, viewer):
            raise FUSEError(errno.ENOENT)

    @_answering
    def getattr(self, inode: int, ctx: RequestContext) -> EntryAttributes:
        return self._lasting.of(inode)

    @_answering
    def readlink(self, inode: int, ctx: RequestContext) -> bytes:
        return self._view.readlink(inode)

    # --- extended attributes ---------------------------------------------------------------

    @_answering
    def getxattr(self, inode: int, name: bytes, ctx: RequestContext) -> bytes:
        if not name.startswith(b"user."):
            # ls(1) asks for access control lists and labels of each listed entry, but only once if
            # the filesystem has none.
            raise FUSEError(errno.EOPNOTSUPP)
        value = self._view.extended_value(inode, name, self._directories.viewer(ctx))
        if value is None:
            raise FUSEError(pyfuse3.ENOATTR)
        return value

    @_answering
    def listxattr(self, inode: int, ctx: RequestContext) -> Sequence[bytes]:
        return self._view.extended(inode, self._directories.viewer(ctx))

    # --- directories -----------------------------------------------------------------------

    @_answering
    def opendir(self, inode: int, ctx: RequestContext) -> int:
        return self._directories.open(inode, ctx)

    async def readdir(self, fh: int, start_id: int, token: ReaddirToken) -> None:
        try:
            node, viewer = self._directories.viewer_of(fh)
            if viewer is None:
                entries = self._view.children(node, start_id)
            else:
                # Finding the names that a viewer may see can take long: other requests must not
                # wait.
                entries = await self._loop.in_slow_thread(self._page, node, start_id, viewer)
            self._list(node, start_id, token, entries)
        except Exception as error:
            raise refusal(error) from None

    def _page(self, node: int, start_id: int, viewer: Viewer) -> Iterator[tuple[bytes, int, int]]:
        entries = self._view.children(node, start_id, viewer)
        return iter(list(itertools.islice(entries, _PAGE)))

    def _list(
        self,
        node: int,
        start_id: int,
        token: ReaddirToken,
        entries: Iterator[tuple[bytes, int, int]],
    ) -> None:
        names_only = self._names_only
        if is_place(node):
            if names_only is None:
                self._unkept.list(entries, token)
            else:
                names_only.list(token, entries, self._view.file_type)
            return
        if node != self._listed:
            self._listed, self._wanted = node, 0
        if names_only is None or self._wanted:
            self._wanted = max(self._wanted - 1, 0)
            self._lasting.list(entries, token)
        elif start_id or self._lasting.list(itertools.islice(entries, _IN_FULL), token):
            names_only.list(token, entries, self._view.file_type)

    @_answering
    def releasedir(self, fh: int) -> None:
        self._directories.release(fh)

    # --- bytes -----------------------------------------------------------------------------

    async def open(self, inode: int, flags: int, ctx: RequestContext) -> FileInfo:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise FUSEError(errno.EROFS)
        try:
            if is_wanted(inode):
                await self._fetch_missing(inode, ctx)
            if is_path_text(inode):  # different for each viewer
                text = self._view.open(inode, self._directories.viewer(ctx))
                return pyfuse3.FileInfo(fh=self._files.add(inode, text, ctx.uid), direct_io=True)
            handle = self._files.open_now(inode, ctx.uid)
            if handle is None:  # the file may have been written to: all of it is read first
                content = await self._loop.in_slow_thread(self._view.open, inode)
                self._files.doubtful.add(inode)
                handle = self._files.add(inode, content, ctx.uid)
        except Exception as error:
            raise refusal(error) from None
        if is_text(handle):
            return pyfuse3.FileInfo(fh=handle, direct_io=True, keep_cache=False)
        if inode in self._files.doubtful:
            self._files.doubtful.discard(inode)
            return pyfuse3.FileInfo(fh=handle, keep_cache=False)
        self._file.fh = handle
        return self._file

    async def _fetch_missing(self, inode: int, ctx: RequestContext) -> None:
        """Wait until a missing file has arrived, or cannot be fetched now; always raises
        `FUSEError`.

        After ESTALE the kernel looks the name up again, and finds the file.
        """
        wanted = self._view.wanted_in(inode)
        fetch = self._fetch
        if wanted is None or fetch is None or not self._waits.take(ctx.uid):
            log.debug("inode %d: missing, and not fetched, for pid %d", inode, ctx.pid)
            raise FUSEError(errno.ENOENT)
        try:
            state = await self._loop.in_fetching_thread(fetch, *wanted)
            log.debug("%s: missing; upstream servers: %s, for pid %d", wanted[0], state, ctx.pid)
        finally:
            self._waits.give_back(ctx.uid)
        if self._view.is_there(inode):
            raise FUSEError(errno.ESTALE)
        self._misses.note_build_id(*wanted, self._callers.name(ctx.pid), of_user(ctx.uid))
        raise FUSEError(errno.ENOENT)

    async def read(self, fh: int, off: int, size: int) -> Any:
        # Any, because pyfuse3 accepts every buffer although its stub says bytes.
        try:
            content = self._files.file(fh).content
            blob = content.blob
            if blob is None:
                return content.text[off : off + size]
            if not blob.is_plain:
                # Decoding takes as long as ten requests.
                loop = self._loop
                wait = loop.in_remote_thread if blob.is_remote else loop.in_thread
                decoded = bytearray(await wait(blob.pread, size, off))
                blank(decoded, off, content.zeros)
                return decoded
            try:
                data: bytearray | memoryview = self._read_cached(fh, off, size)
            except OSError as error:
                # EAGAIN: it has to come from the disk; ENOTSUP: this filesystem cannot tell
                if error.errno not in (errno.EAGAIN, errno.EOPNOTSUPP):
                    raise
                data = await self._loop.in_thread(_read_whole, fh, off, size)
            # after the read, because a write may come after an earlier check
            if blob.was_written():
                raise FUSEError(errno.ESTALE)
            if content.zeros:
                blank(data, off, content.zeros)
            return data
        except Exception as error:
            raise refusal(error) from None

    def _read_cached(self, fd: int, offset: int, size: int) -> memoryview:
        # The kernel takes a short answer for the end of the file, and keeps that as its size. So a
        # read that was short because the rest is not in memory must continue.
        if size > len(self._buffer):
            self._buffer = huge_buffer(size)
        buffer = self._buffer
        done = 0
        while done < size:
            more = os.preadv(fd, [buffer[done:size]], offset + done, os.RWF_NOWAIT)
            if not more:
                _check_end(fd, offset + done)
                break
            done += more
        return buffer[:done]

    async def release(self, fh: int) -> None:
        try:
            self._files.release(fh)
        except Exception as error:
            raise refusal(error) from None

    # --- the rest --------------------------------------------------------------------------

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        """Do nothing, because nothing is kept for an inode."""

    @_answering
    def statfs(self, ctx: RequestContext) -> StatvfsData:
        usage = os.statvfs(self._store_path)
        answer = pyfuse3.StatvfsData()
        answer.f_bsize = usage.f_bsize
        answer.f_frsize = usage.f_frsize
        answer.f_blocks = usage.f_blocks
        answer.f_bfree = usage.f_bfree
        answer.f_bavail = usage.f_bavail
        answer.f_files = usage.f_files
        answer.f_ffree = usage.f_ffree
        answer.f_favail = usage.f_favail
        answer.f_namemax = MAX_NAME
        return answer

    setattr = mknod = mkdir = unlink = rmdir = symlink = rename = link = _REFUSED
    write = create = setxattr = removexattr = _REFUSED

    def close_idle(self) -> None:
        """Close idle files."""
        self._files.close_idle()

    def close(self) -> None:
        """Close files that were still open when the session ended."""
        self._files.close()


def _check_end(fd: int, offset: int) -> None:
    """Raise BlockingIOError if a file goes on at ``offset``, where a read with RWF_NOWAIT returned
    0: Linux 5.9 and 5.10 do that at a page that starts readahead (preadv2(2), BUGS).
    """
    if offset < os.fstat(fd).st_size:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def _read_whole(fd: int, offset: int, size: int) -> bytearray:
    """Read until ``size`` or the end of the file, waiting for the disk."""
    buffer = bytearray(size)
    view = memoryview(buffer)
    done = 0
    while done < size:
        more = os.preadv(fd, [view[done:]], offset + done)
        if not more:
            break
        done += more
    view.release()
    del buffer[done:]
    return buffer


class Callers:
    """Looks up the names of calling processes.

    Remembers the last process, which usually makes the next call, too.
    """

    def __init__(self) -> None:
        self._last = (0, UNKNOWN, 0.0)

    def name(self, pid: int) -> bytes:
        """Return the name of the thread ``pid``.

        Returns `UNKNOWN` if the thread has ended, or if ``pid`` is 0: then the caller is in a PID
        namespace that this process cannot see.
        """
        known, name, until = self._last
        now = time.monotonic()
        if pid != known or now > until:
            name = _name(pid)
            self._last = (pid, name, now + _REMEMBERED_S)
        return name


def _name(pid: int) -> bytes:
    try:
        return procfs.thread_name(pid) or UNKNOWN
    except OSError:
        return UNKNOWN


def huge_buffer(size: int) -> memoryview:
    """Return at least ``size`` bytes of zeroed memory, on huge pages if the kernel has any.

    Every byte that is read passes through this memory twice: from the page cache into the memory,
    and from there into the kernel's request. On pages of 4 KiB the second copy looks up 256 of them
    for a request of 1 MiB, and both together take half as long again as on one page of 2 MiB
    (measured: 314 against 217 us of the server's time for 1 MiB).
    """
    size = -(-size // _HUGE_PAGE) * _HUGE_PAGE
    area = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without transparent huge pages
        area.madvise(mmap.MADV_HUGEPAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    start = -address % _HUGE_PAGE
    return memoryview(area)[start : start + size]


FOREVER_S = 24 * 3600.0
"""Seconds for which the kernel may cache a name that only a commit can change. The mount
invalidates such names.
"""

VOLATILE_S = 1.0
"""Seconds for which the kernel may cache the attributes of a node whose content changes."""

FLEETING_S = 1.0
"""Seconds for which the kernel may cache names in the trees for people, which are not
invalidated.
"""


class Replies:
    """Two reply objects, filled anew for each node; `operations` explains why that is safe."""

    def __init__(self, view: View, keep_name_s: float) -> None:
        """``keep_name_s`` is the time for which the kernel may cache a name that leads
        to a node.
        """
        self._view = view
        self._entry, self._other = pyfuse3.EntryAttributes(), pyfuse3.EntryAttributes()
        self._entry.entry_timeout = self._other.entry_timeout = keep_name_s
        self._last: Attributes | None = None
        self._before: Attributes | None = None

    def of(self, node: int) -> EntryAttributes:
        """Return the reply for a node; raises the errors of `View.attributes`."""
        attributes = self._view.attributes(node)
        if attributes is not self._last:
            # Directories, which all have the same attributes, and files alternate.
            self._last, self._before = self._before, self._last
            self._entry, self._other = self._other, self._entry
            if attributes is not self._last:
                self._fill(attributes)
        self._entry.st_ino = node
        return self._entry

    def list(self, entries: Iterable[tuple[bytes, int, int]], token: ReaddirToken) -> bool:
        """Add entries with their attributes to a listing; return False if an entry did not fit."""
        reply = pyfuse3.readdir_reply
        for name, node, offset in entries:
            try:
                entry = self.of(node)
            except (OSError, BuildIdFsError):
                continue  # removed since it was listed, or damaged: the rest is still listed
            if not reply(token, name, entry, offset):
                return False
        return True

    def _fill(self, attributes: Attributes) -> None:
        entry = self._entry
        size, mtime = attributes.size, attributes.mtime_ns
        entry.st_mode = attributes.mode
        entry.st_uid = attributes.uid
        entry.st_gid = attributes.gid
        entry.st_size = size
        entry.st_blocks = (size + 511) // 512
        entry.st_mtime_ns = mtime
        entry.st_ctime_ns = mtime
        entry.st_atime_ns = mtime
        entry.attr_timeout = VOLATILE_S if attributes.volatile else FOREVER_S
        self._last = attributes


_PROBE = 0x0123456789ABCDEF
_PROBE_AT = 0
_HEADER = object.__basicsize__


class NamesOnly:
    """A reply object for entries with name, type and number only.

    pyfuse3 answers every listing with READDIRPLUS, for which the kernel makes an inode and a dentry
    for each entry. For a directory that is only listed, this takes most of the time, and about a
    kilobyte of kernel memory for each build ID.

    An entry whose node ID is 0 has a name, a type and an inode number, and is not looked up.
    pyfuse3 sets both numbers of an entry at once, so this class writes into its object:
    `fuse_entry_param` follows the object's header, and its first field is the node ID. `probe`
    checks that first. Source: fs/fuse/readdir.c fuse_direntplus_link ("zero nodeid does not mean
    ENOENT").
    """

    def __init__(self, entry: pyfuse3.EntryAttributes, node_id: ctypes.c_uint64) -> None:
        self._entry = entry
        self._node_id = node_id

    @classmethod
    def probe(cls) -> NamesOnly | None:
        """Return a `NamesOnly`, or None if pyfuse3 keeps the node ID at another place."""
        entry = pyfuse3.EntryAttributes()
        words = (type(entry).__basicsize__ - _HEADER) // 8
        if sys.implementation.name != "cpython" or words < 2:
            return None
        inside = (ctypes.c_uint64 * words).from_address(id(entry) + _HEADER)
        entry.st_ino = _PROBE
        # twice: the node ID, and the inode number in struct stat
        if inside[_PROBE_AT] != _PROBE or list(inside).count(_PROBE) != 2:
            log.info("this pyfuse3 is not built as expected: listings will be slower")
            return None
        return cls(entry, ctypes.c_uint64.from_address(id(entry) + _HEADER + 8 * _PROBE_AT))

    def list(
        self,
        token: pyfuse3.ReaddirToken,
        entries: Iterable[tuple[bytes, int, int]],
        type_of: Callable[[int], int],
    ) -> None:
        """Reply with as many of (name, node, offset) as fit."""
        entry, node_id, reply = self._entry, self._node_id, pyfuse3.readdir_reply
        for name, node, offset in entries:
            entry.st_ino = node
            entry.st_mode = type_of(node)
            node_id.value = 0
            if not reply(token, name, entry, offset):
                return
