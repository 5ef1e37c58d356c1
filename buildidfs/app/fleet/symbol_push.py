# SPDX-License-Identifier: Apache-2.0
"""Push to a server of profiles: upload the files from which it can name functions.

A server has one place for a build ID, so a push sends only served files, and no file of a build ID
that unrelated programs have. The server gets the file that names the most functions: the debug
file, else the executable. Parca also gets each executable, which it disassembles.

The push asks the server about each file. An entry in the ledger replaces this question for a day
only, because servers drop files. The ledger also records which uploads this store has begun: if a
push is killed, the next one resumes these uploads, which the server does not allow to other
clients.
"""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Final

from buildidfs.app.fleet.ledger import Entry, Ledger
from buildidfs.app.fleet.uploader import DAMAGED, Job, Options, Stopped, Summary, Uploader
from buildidfs.errors import IntegrityError, RemoteRefused, RemoteUnavailable
from buildidfs.model import Artifact, BuildId, Digest, Kind, Quality
from buildidfs.upstream import options as upstream_options
from buildidfs.upstream.symbol_servers import Declined, File, SymbolServer, Upload, symbol_server
from buildidfs.view.permissions import is_public

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from buildidfs.capture.base import Progress
    from buildidfs.store import Store

_log = logging.getLogger(__name__)

_TIMEOUT_S: Final = 60.0
_ATTEMPTS: Final = 3
"""Attempts to upload a file while the server answers."""
_ASK_AGAIN_S: Final = 86_400
_STALE_S: Final = 3600
"""After this time a server lets others upload a file whose upload was not finished."""

_NAMELESS: Final = "it has no useful symbols, and no debuginfo was captured"
_TRUNCATED: Final = "the file is truncated"

_BEGUN: Final = "begun"
_PUSHED: Final = "pushed"
_PRESENT: Final = "present"
"""The states in the ledger: an upload was begun, and the server may wait for the file; the server
has our file; the server had a file before we pushed one. The worth of the file follows, see
`_worth`.
"""


class _Job(Job):
    """A file, and its place on the server."""

    file: File


class SymbolPusher(Uploader[_Job]):
    """Pushes the files of a store to a server of profiles; `close` also closes the server."""

    workers = 4

    def __init__(self, store: Store, server: SymbolServer, options: Options) -> None:
        """Raises `StoreError`."""
        super().__init__(store, options)
        self._server = server
        self._ledger = Ledger(store.path, f"{server.name} {server.url}")

    def close(self) -> None:
        """Close the ledger and the connections."""
        self._ledger.close()
        self._server.close()

    def run(
        self,
        ordinals: Iterable[tuple[int, BuildId]] | None = None,
        progress: Progress | None = None,
    ) -> Summary:
        """Do one pass; see `Uploader.run`."""
        chosen = self._store.index.build_ids_from() if ordinals is None else ordinals
        summary = Summary()
        try:
            self._send(self._jobs(chosen, summary), summary, progress)
        except Stopped:
            _log.info("stopped before all files were pushed")
        return summary

    # --- which files are sent --------------------------------------------------------------------

    def _jobs(self, chosen: Iterable[tuple[int, BuildId]], summary: Summary) -> Iterator[_Job]:
        for ordinal, build_id in chosen:
            if self._store.aliases.is_ambiguous(ordinal):
                summary.ambiguous += 1
                _log.info("left out %s: unrelated programs share this build ID", build_id)
                continue
            for slot, artifact in self._fitting(ordinal, build_id, summary):
                if self._is_done(build_id, slot, artifact):
                    summary.present += 1
                    continue
                file = File(
                    build_id,
                    artifact.adopted,
                    slot,
                    artifact.kind,
                    artifact.size,
                    artifact.digest,
                    self._name(artifact),
                )
                yield _Job(build_id, artifact, file)

    def _fitting(
        self, ordinal: int, build_id: BuildId, summary: Summary
    ) -> list[tuple[Kind, Artifact]]:
        """Return the files of a build ID that the server should have, each with its place there."""
        held: dict[Kind, Artifact] = {}
        why = ""
        for kind in (Kind.EXECUTABLE, Kind.DEBUGINFO, Kind.VDSO):
            artifact = self._store.index.artifact(ordinal, kind)
            if artifact is None:
                continue
            if not is_public(artifact):
                summary.private += 1
                continue
            why = self._server.misfit(build_id, is_adopted=artifact.adopted)
            if why:
                held.clear()
                break
            why = _TRUNCATED if artifact.truncated else _NAMELESS
            if not artifact.truncated:
                held[kind] = artifact
        found = []
        naming = self._naming(held)
        if naming is not None:
            found.append((Kind.DEBUGINFO, naming))
        if self._server.takes_executables and Kind.EXECUTABLE in held:
            found.append((Kind.EXECUTABLE, held[Kind.EXECUTABLE]))
        if why and not found:
            summary.unsuitable += 1
            _log.info("left out %s: %s", build_id, why)
        return found

    def _naming(self, held: dict[Kind, Artifact]) -> Artifact | None:
        """Return the file that names the most functions."""
        debug = held.get(Kind.DEBUGINFO)
        program = held.get(Kind.EXECUTABLE) or held.get(Kind.VDSO)
        if program is None:
            return debug
        if debug is None:
            return program if program.quality >= self._server.least_quality else None
        # Servers read the table of a Go program itself; its debug file was made from this table.
        is_of_go = debug.quality is Quality.GOPCLNTAB
        is_same = debug.digest == program.digest
        return program if is_of_go or is_same or _worth(program) > _worth(debug) else debug

    def _is_done(self, build_id: BuildId, slot: Kind, artifact: Artifact) -> bool:
        state, at = self._ledger.noted(build_id, slot).get(artifact.digest, ("", 0))
        is_recent = time.time() - at < _ASK_AGAIN_S
        is_there = state.startswith((_PUSHED, _PRESENT))
        return is_there and is_recent and not self._options.verify

    def _name(self, artifact: Artifact) -> str:
        """Return a name of the file from a public place, for people; empty if there is none."""
        for each in self._store.index.origins(artifact.ordinal):
            if each.digest == artifact.digest and each.origin.is_public:
                return os.path.basename(each.origin.path).decode("utf-8", "backslashreplace")
        return ""

    # --- one file ------------------------------------------------------------------------------

    def _sent(self, job: _Job) -> Summary:
        failure: RemoteUnavailable | None = None
        for _ in range(_ATTEMPTS):
            asked = self._persistently(lambda: self._begun(job))
            if isinstance(asked, Declined):
                return Summary(leased=1) if asked.is_busy else Summary(present=1)
            try:
                self._upload(asked, job.file)
            except RemoteUnavailable as error:
                # The cause is the server or this file; the next question to the server shows which.
                failure = error
                continue
            self._note_pushed(job)
            return Summary(pushed=1, bytes=job.file.size)
        raise RemoteRefused(
            f"{failure}, {_ATTEMPTS} times while {job.file.size} bytes were sent: is"
            f" {self._server.time_limit} of the server too short for that?"
        )

    def _begun(self, job: _Job) -> Upload | Declined:
        """Announce an upload to the server, and record its answer."""
        file = job.file
        noted = self._ledger.noted(file.build_id, file.slot)
        state, at = noted.pop(file.digest, ("", 0))
        if not state:
            self._note(job, _BEGUN)  # recorded before the server is asked
        resume = state.startswith(_BEGUN) and time.time() - at < _STALE_S
        replace = any(_is_worse(other, job.artifact) for other, _ in noted.values())
        asked = self._server.begin(file, resume=resume, replace=replace)
        if isinstance(asked, Upload):
            self._note(job, _BEGUN)
            return asked
        _log.info("%s does not want %s: %s", self._server.label, file.build_id, asked.why)
        if not asked.is_busy:
            is_ours = state.startswith((_BEGUN, _PUSHED))
            self._note(job, _PUSHED if is_ours else _PRESENT)
        elif not state:
            self._forget(job, file.digest)
        return asked

    def _note(self, job: _Job, state: str) -> None:
        file = job.file
        noted = f"{state} {_worth(job.artifact)}"
        self._ledger.add([Entry(file.build_id, file.slot, file.digest, noted)])

    def _note_pushed(self, job: _Job) -> None:
        """Record that the server has a file, which replaces any other file in its place."""
        self._note(job, _PUSHED)
        for digest in self._ledger.noted(job.build_id, job.file.slot):
            if digest != job.file.digest:
                self._forget(job, digest)

    def _forget(self, job: _Job, digest: Digest) -> None:
        self._ledger.forget(Entry(job.build_id, job.file.slot, digest, ""))

    def _upload(self, upload: Upload, file: File) -> None:
        """Send the bytes. Raises `RemoteUnavailable`, `RemoteRefused`, `RemoteDenied`."""
        with self._store.blobs.open(file.digest) as blob:
            if blob.computed() != file.digest:
                raise IntegrityError(DAMAGED)
            # Servers limit the time of an upload, so the pause comes before it and not within it.
            self._pace.wait(file.size)
            self._server.send(upload, file, self._until_stopped(blob.chunks()))
        self._server.finish(upload, file)

    def _until_stopped(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            if self._stop.is_set():
                raise Stopped
            yield chunk


def _worth(artifact: Artifact) -> int:
    """Return a number that ranks files of a build ID by how many functions they name."""
    return 2 * artifact.quality + (artifact.kind is Kind.DEBUGINFO)


def _is_worse(state: str, artifact: Artifact) -> bool:
    """Return True if a state is that of a file which we pushed, and which names fewer functions
    than ``artifact``.
    """
    what, _, worth = state.partition(" ")
    return what == _PUSHED and worth.isdecimal() and int(worth) < _worth(artifact)


def pusher_of(
    store: Store, kind: str, url: str, headers_file: str, options: Options
) -> SymbolPusher:
    """Return a pusher to a server of a kind at a URL. Raises `UsageError`, `StoreError`."""
    headers = upstream_options.headers_in(headers_file)
    return SymbolPusher(store, symbol_server(kind, url, _TIMEOUT_S, headers), options)
