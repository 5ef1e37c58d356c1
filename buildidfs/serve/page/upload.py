# SPDX-License-Identifier: Apache-2.0
"""A profile, core file or binary that a visitor uploads, and the share of it that the store can
name.

A separate process reads the file, with limits on its memory and time, and without the rights of
the server. It has an empty store, not that of the server, because the journal would add the private
files of this host to the answer. The server then looks up the build IDs in files that every user
may read.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import resource
import select
import signal
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Final

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import Field, File, FormParser, parse_options_header

from buildidfs import answers
from buildidfs.catalog import history, remedies
from buildidfs.catalog.coverage import Coverage, CoverageLookup
from buildidfs.errors import BuildIdFsError, UsageError
from buildidfs.formats.perf import headers
from buildidfs.linux import child, confinement, file_ops
from buildidfs.linux.file_ops import closing_fd
from buildidfs.model import BuildId
from buildidfs.profile import cores, inputs
from buildidfs.profile.perf_data import Profile
from buildidfs.serve.messages import BadRequest
from buildidfs.serve.page.overview import is_served, text
from buildidfs.store import Store
from buildidfs.store.permissions import PUBLIC

if TYPE_CHECKING:
    from collections.abc import Sequence

    from buildidfs.linux.child import Child

MOST_BYTES: Final = 16 << 20
"""The largest size of an upload in bytes, with the form around it."""

MOST_ROWS: Final = 500
_LIMIT_S: Final = 20.0
_MEMORY_BYTES: Final = 1 << 30
_MOST_FILES: Final = 64
_ADDRESSES: Final = 1 << 46  # an index is mapped whole
_MOST_REPLY: Final = 8 << 20
_MOST_PARTS: Final = 8
_GRACE_S: Final = 5.0

# Its warnings are about the bytes of strangers.
logging.getLogger("python_multipart").addHandler(logging.NullHandler())


class UploadedName(msgspec.Struct):
    """A file that an upload names, see `coverage.BinaryCoverage`."""

    path: bytes
    build_id: bytes
    weight: int
    why: str


class UploadedFiles(msgspec.Struct):
    """The files that an upload names, or the ``error`` as a text. ``host`` made the profile."""

    unit: str = ""
    rows: list[UploadedName] = []
    incomplete: str = ""
    error: str = ""
    host: str = ""


# --- in the server -------------------------------------------------------------------------------


def file_in(body: bytes, content_type: bytes) -> bytes:
    """Return the file in the body of a request: that of a form, or all of another body.

    Raises `BadRequest`.
    """
    kind, options = parse_options_header(content_type)
    if not kind.startswith(b"multipart/"):
        return body
    parts: list[Field | File] = []

    def add(part: Field | File) -> None:
        parts.append(part)
        if len(parts) > _MOST_PARTS:
            raise FormParserError("too many parts")

    boundary = options.get(b"boundary")
    config = {"MAX_MEMORY_FILE_SIZE": MOST_BYTES, "UPLOAD_ERROR_ON_BAD_CTE": True}
    try:
        form = FormParser(kind.decode("latin-1"), add, add, boundary=boundary, config=config)
        form.write(body)
        form.finalize()
    except FormParserError as error:
        raise BadRequest(f"the form cannot be read: {error}") from None
    for part in parts:
        if part.field_name == b"file":
            if isinstance(part, File):
                part.file_object.seek(0)
                return part.file_object.read()
            return part.value or b""
    raise BadRequest("the form has no part with the name file")


def measure(store: Store, content: bytes) -> answers.Dropped:
    """Read an upload, and return the share of it that public files can name.

    Raises `BadRequest` if it cannot be read, `StoreError`, `IntegrityError`.
    """
    if not content:
        raise BadRequest("choose a file first: this one is empty")
    reading = _read(content)
    if reading.error:
        raise BadRequest(reading.error)
    holdings = CoverageLookup(store, PUBLIC)
    rows = []
    for each in reading.rows:
        build_id = BuildId(each.build_id) if each.build_id else None
        if build_id is None and each.why == remedies.NO_BUILD_ID:
            build_id = _seen_at(store, each.path, reading.host)
        why = each.why if build_id is None else ""
        rows.append(holdings.row("", each.path, build_id, each.weight, why))
    found = Coverage(rows, reading.unit, incomplete=reading.incomplete)
    return answers.Dropped(
        unit=found.unit,
        weight=found.weight,
        executable=round(found.executable(), 6),
        symbols=round(found.symbols(), 6),
        debuginfo=round(found.debuginfo(), 6),
        incomplete=reading.incomplete,
        files=[
            answers.DroppedFile(
                path=text(row.path),
                build_id="" if row.build_id is None else row.build_id.hex(),
                weight=row.weight,
                quality=row.symbols.name.lower(),
                why=row.why,
                remedy=remedies.of_reason(row.why).text if row.why else "",
            )
            for row in found.worst_first()[:MOST_ROWS]
        ],
        files_total=len(rows),
    )


def _seen_at(store: Store, path: bytes, host: str) -> BuildId | None:
    """Return the only build ID that was seen at a path on a host, if every user may know it.

    A path that had another file too, public or not, identifies nothing.
    """
    if not host or not path.startswith(b"/"):
        return None
    found = {each.build_id for each in history.at_path(store, path) if each.host == host}
    build_id = found.pop() if len(found) == 1 else None
    if build_id is None or not is_served(store, store.index.ordinal(build_id)):
        return None
    return build_id


def _read(content: bytes) -> UploadedFiles:
    """Return the answer of the process that reads an upload."""
    try:
        with tempfile.TemporaryDirectory(prefix="buildidfs-drop.") as directory:
            reply = _answer(content, directory)
    except OSError as error:
        return UploadedFiles(error=f"the file cannot be read: {error.strerror}")
    try:
        return msgspec.json.decode(reply, type=UploadedFiles)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return UploadedFiles(error="the file takes too much time or memory to read")


def _answer(content: bytes, directory: str) -> bytes:
    """Return the output of the process that reads an upload; ``directory`` is empty. Raises
    OSError.
    """
    with closing_fd(os.memfd_create("upload", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)) as fd:
        file_ops.write_fully(fd, content)
        os.fchmod(fd, 0o444)  # the process becomes another user
        words = [str(fd), str(os.getpid()), directory]
        program = child.python(__name__, *words, paths=list(filter(None, sys.path)))
        process = child.start(
            [sys.executable, "-I", *program],
            env={},  # variables may be keys and passwords
            cwd="/",
            stdout=child.PIPE,
            stderr=child.DEVNULL,
            pass_fds=[fd],
            new_session=True,
            end_with_us=signal.SIGKILL,
        )
    try:
        return _reply_of(process)
    finally:
        process.end(_GRACE_S)


def _reply_of(process: Child) -> bytes:
    """Return the output of the process until it ends, or until its time is over."""
    assert process.stdout is not None
    deadline = time.monotonic() + _LIMIT_S
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    reply = b""
    while len(reply) < _MOST_REPLY:
        if not poll.poll(max(deadline - time.monotonic(), 0) * 1000):
            return b""
        piece = os.read(process.stdout.fileno(), 1 << 16)
        if not piece:
            break
        reply += piece
    return reply


# --- in a process of its own ---------------------------------------------------------------------


def main(words: Sequence[str]) -> None:
    """Read the file with a descriptor, and write a `UploadedFiles` as JSON.

    Arguments: the descriptor, the process that starts this one, and an empty directory, in which
    that process removes what is left.
    """
    fd, parent, directory = int(words[0]), int(words[1]), words[2]
    path = b"/proc/self/fd/%d" % fd
    with Store.create(os.path.join(directory, "store")) as empty:
        try:
            _confine(parent)
            reading = _reading(empty, path)
        except UsageError as error:
            reading = UploadedFiles(error=_called(str(error), path))
        except (BuildIdFsError, OSError, MemoryError) as error:
            reading = UploadedFiles(error=f"the file cannot be read: {type(error).__name__}")
        sys.stdout.buffer.write(msgspec.json.encode(reading))
        sys.stdout.flush()
        os._exit(0)  # the store cannot be closed without its rights


def _reading(empty: Store, path: bytes) -> UploadedFiles:
    """Return the files that the file at a path names. Raises `UsageError`."""
    if not inputs.is_profile_or_core(path):
        return UploadedFiles("files", [UploadedName(b"", bytes(_build_id(path)), 1, "")])
    found = inputs.coverage_of_file(empty, path)
    rows = [
        UploadedName(row.path, bytes(row.build_id or b""), row.weight, row.why)
        for row in found.rows
    ]
    return UploadedFiles(found.unit, rows, _called(found.incomplete, path), host=_host_of(path))


def _host_of(path: bytes) -> str:
    """Return the name of the machine that made a profile; empty for other files."""
    if cores.is_core(path):
        return ""
    with Profile(path) as profile:
        return profile.text(headers.HOSTNAME).decode("utf-8", "surrogateescape")


def _build_id(path: bytes) -> BuildId:
    """Return the build ID of a binary. Raises `UsageError`."""
    with open(path, "rb") as file:
        if file.read(4) != b"\x7fELF":
            raise UsageError(
                "this is neither a profile of perf, nor a core file, nor a binary;"
                " unpack a compressed one first"
            )
    return inputs.build_id_of_binary(path)


def _called(message: str, path: bytes) -> str:
    """Replace the path in a message about an upload, because the path means nothing to
    the visitor.
    """
    return message.replace(path.decode(), "the file")


def _confine(parent: int) -> None:
    """Give up all rights but those of a symbolizer (see `linux.sandbox`). Raises OSError."""
    with contextlib.suppress(ImportError):
        importlib.import_module("zstandard")  # which is imported late, when no file can be opened
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(_MOST_FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    limits = _MEMORY_BYTES, _ADDRESSES, int(_LIMIT_S)
    for _ in confinement.confine(parent, limits, ["/nonexistent"], [""]):
        pass
