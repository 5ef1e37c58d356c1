# SPDX-License-Identifier: Apache-2.0
"""Servers of profiles, which take files to name functions: Parca and Pyroscope.

A client asks the server if it wants a file, sends the bytes, and reports that they are complete.
After the first step the server records that an upload has begun, and refuses all others for some
minutes.

    Parca      POST /api/shouldinitiateupload, /api/initiateupload; then PUT to a signed URL or POST
               /api/upload, a stream of JSON messages with base64; POST /api/markuploadfinished.
               It is the HTTP side of the gRPC service parca.debuginfo.v1alpha1.DebuginfoService.
    Pyroscope  POST /debuginfo.v1alpha1.DebuginfoService/ShouldInitiateUpload, Upload/ID with the
               bytes, UploadFinished: the protocol Connect with JSON.

A server takes one file for a build ID, and keeps the first one. Parca also takes an executable to
disassemble, and replaces a file on request.
"""

from __future__ import annotations

import base64
import urllib.parse
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Final

import msgspec

from buildidfs.errors import RemoteDenied, RemoteRefused, RemoteUnavailable, UsageError, needs_extra
from buildidfs.model import BuildId, Digest, Kind, Quality
from buildidfs.upstream.server import Unavailable, host_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from buildidfs.upstream.http_client import Answer, HttpClient

_FORBIDDEN: Final = frozenset((401, 403, 407))
_BUSY: Final = frozenset((429, 502, 503, 504))
_NO_SERVICE: Final = frozenset((404, 405, 501))
_JSON: Final = ("Content-Type", "application/json")
_BYTES: Final = ("Content-Type", "application/octet-stream")
_SAID_CHARACTERS: Final = 200
_TOO_LATE_WORDS: Final = ("timeout", "upload failed")
"""The errors of Parca's gateway, and of Pyroscope, for an upload that took too long."""
_IN_PROGRESS: Final = "still in-progress"
"""The error of both servers for an upload that another client has begun."""


class File(msgspec.Struct, frozen=True):
    """A file to upload. ``slot`` is what the server does with it: `Kind.DEBUGINFO` if it names
    functions, `Kind.EXECUTABLE` if it disassembles the file. ``kind`` is the kind of the file
    itself: an executable with symbols may be in the slot DEBUGINFO.
    """

    build_id: BuildId
    is_adopted: bool
    slot: Kind
    kind: Kind
    size: int
    digest: Digest
    name: str


class Upload(msgspec.Struct, frozen=True):
    """The answer of a server that wants the file.

    ``url`` is the destination, ``id`` the server's name of the upload.
    """

    id: str = ""
    url: str = ""


class Declined(msgspec.Struct, frozen=True):
    """The answer of a server that does not want the file.

    ``is_busy`` is True if another client may be uploading it.
    """

    why: str
    is_busy: bool = False


class _Fault(Exception):
    """An answer with an error status.

    ``code`` is the error code of the protocol, if the answer has one. ``is_foreign`` is True if the
    server does not know the requested path.
    """

    def __init__(self, said: str, code: object = None, *, is_foreign: bool = False) -> None:
        super().__init__(said)
        self.said = said
        self.code = code
        self.is_foreign = is_foreign


class SymbolServer(ABC):
    """A server at a URL. Thread-safe.

    All methods raise `RemoteUnavailable` if the server does not answer, `RemoteDenied` if it
    refuses all requests, and `RemoteRefused` if it refuses the file.
    """

    name: ClassVar[str]
    takes_executables: ClassVar[bool]
    """True if the server takes an executable in addition to the file that names functions."""
    least_quality: ClassVar[Quality]
    """The least quality of an executable that is uploaded as the file that names functions."""
    time_limit: ClassVar[str]
    """The server's option for the time that an upload may take."""
    _headers: ClassVar[tuple[tuple[str, str], ...]] = (_JSON,)

    def __init__(self, url: str, client: HttpClient) -> None:
        self.url = url.rstrip("/")
        self.label = f"{self.name} at {host_of(url)}"
        self._client = client

    @abstractmethod
    def misfit(self, build_id: BuildId, *, is_adopted: bool) -> str:
        """Return the reason why the server cannot use a build ID; empty if it can."""

    @abstractmethod
    def begin(self, file: File, *, resume: bool, replace: bool) -> Upload | Declined:
        """Ask the server to take a file.

        ``resume`` is True if an unfinished upload on the server is ours and has ended. ``replace``
        is True if the server's present file is ours and worse.
        """

    @abstractmethod
    def send(self, upload: Upload, file: File, pieces: Iterable[bytes]) -> None:
        """Send the bytes of the file. Also raises errors of ``pieces``."""

    @abstractmethod
    def finish(self, upload: Upload, file: File) -> None:
        """Report to the server that all bytes were sent."""

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    # --- requests ------------------------------------------------------------------------------

    def _call(self, path: str, message: dict[str, Any]) -> dict[str, Any]:
        """Send a JSON object; return the JSON object in the answer. Also raises `_Fault`."""
        answer = self._sent(
            "POST", f"{self.url}{path}", msgspec.json.encode(message), self._headers
        )
        found = _object(answer.body)
        if found is None:
            raise RemoteDenied(f"{self.label}: the answer at {path} is not JSON: check the URL")
        return found

    def _sent(
        self,
        method: str,
        url: str,
        content: bytes | Iterable[bytes],
        headers: Iterable[tuple[str, str]],
        *,
        is_own: bool = True,
    ) -> Answer:
        """Send a request; return a successful answer. Raises `_Fault` for any other."""
        try:
            answer = self._client.send(method, url, content, (*headers,), is_own=is_own)
        except Unavailable as error:
            is_lasting = not (error.transient or error.hangs)
            raise (RemoteDenied if is_lasting else RemoteUnavailable)(
                f"{self.label} {error}"
            ) from error
        if 200 <= answer.status < 300:
            return answer
        if answer.status in _BUSY:
            raise RemoteUnavailable(f"{self.label} answers {answer.said}")
        if not is_own:
            raise _Fault(answer.said)  # the text of a storage may contain keys
        if answer.status in _FORBIDDEN:
            raise RemoteDenied(f"{self.label} refuses us: {answer.said}; try --headers-file")
        if 300 <= answer.status < 400:
            to = _shown(answer.location)
            raise RemoteDenied(f"{self.label} redirects to {to}: give the URL that it leads to")
        found = _object(answer.body)
        if found is None and answer.status in _NO_SERVICE:
            path = urllib.parse.urlsplit(url).path
            raise _Fault(f"the server has no {path}; check the URL", is_foreign=True)
        found = found or {}
        text = str(found.get("message") or "") or answer.body.decode("utf-8", "replace")
        raise _Fault(f"{answer.said}: {_printable(text)}", found.get("code"))

    def _refused(self, fault: _Fault) -> RemoteRefused | RemoteDenied:
        """Return the error for a fault. If the server lacks the path, the error concerns
        all files.
        """
        error = RemoteDenied if fault.is_foreign else RemoteRefused
        is_late = any(words in fault.said for words in _TOO_LATE_WORDS)
        hint = f"; is {self.time_limit} of the server too short for that?" if is_late else ""
        return error(f"{self.label} refuses the file: {fault.said}{hint}")

    def _wants(self, said: dict[str, Any]) -> bool:
        """Return True if the server wants the file, according to its answer.

        Raises `RemoteDenied` if the answer does not say.
        """
        if not said.keys() & {"shouldInitiateUpload", "reason"}:
            raise RemoteDenied(f"{self.label} does not say if it wants the file: check the URL")
        return said.get("shouldInitiateUpload") is True

    def _declined(self, reason: object) -> Declined:
        why = _printable(str(reason or "")) or "it gives no reason"
        return Declined(why, _IN_PROGRESS in why)


class Parca(SymbolServer):
    """A Parca server, over its HTTP interface."""

    name = "parca"
    takes_executables = True
    least_quality = Quality.DYNSYM
    time_limit = "--http-read-timeout"

    _TYPES: Final = {
        Kind.DEBUGINFO: "DEBUGINFO_TYPE_DEBUGINFO_UNSPECIFIED",
        Kind.EXECUTABLE: "DEBUGINFO_TYPE_EXECUTABLE",
    }
    _TOO_LATE: Final = (6, 9)
    """The codes of gRPC ALREADY_EXISTS and FAILED_PRECONDITION."""

    def misfit(self, build_id: BuildId, *, is_adopted: bool) -> str:
        """Return an empty text: Parca takes all build IDs, adopted ones as hashes, as its agent
        sends them.
        """
        return ""

    def begin(self, file: File, *, resume: bool, replace: bool) -> Upload | Declined:
        """Ask the server, and initiate the upload; with force if that is needed."""
        asked = self._named(file) | {"hash": file.digest.hex()}
        try:
            force = False
            said = self._call("/api/shouldinitiateupload", asked)
            if not self._wants(said):
                is_busy = self._declined(said.get("reason")).is_busy
                force = resume if is_busy else replace
                if force:
                    said = self._call("/api/shouldinitiateupload", asked | {"force": True})
            if not self._wants(said):
                return self._declined(said.get("reason"))
            size = {"size": str(file.size), "force": force}
            answer = self._call("/api/initiateupload", asked | size)
        except _Fault as fault:
            if fault.code in self._TOO_LATE:
                return self._declined(fault.said)  # another client was faster
            raise self._refused(fault) from fault
        return self._instructed(answer.get("uploadInstructions"))

    def _named(self, file: File) -> dict[str, Any]:
        return {
            "buildId": str(file.build_id),
            "buildIdType": "BUILD_ID_TYPE_HASH" if file.is_adopted else "BUILD_ID_TYPE_GNU",
            "type": self._TYPES[file.slot],
        }

    def _instructed(self, told: object) -> Upload:
        """Return the upload that the server requests."""
        told = told if isinstance(told, dict) else {}
        upload_id, url = told.get("uploadId"), told.get("signedUrl")
        strategy = told.get("uploadStrategy")
        if not isinstance(upload_id, str) or not upload_id:
            raise RemoteRefused(f"{self.label} wants the file, but gives no ID for its upload")
        if strategy == "UPLOAD_STRATEGY_GRPC":
            return Upload(upload_id)
        if strategy != "UPLOAD_STRATEGY_SIGNED_URL" or not isinstance(url, str):
            shown = _printable(str(strategy))
            raise RemoteRefused(f"{self.label} requests an upload of an unknown kind: {shown}")
        allowed = ("https://",) if self.url.startswith("https:") else ("https://", "http://")
        if not url.startswith(allowed):
            raise RemoteRefused(f"{self.label} requests an upload to a URL without TLS")
        return Upload(upload_id, url)

    def send(self, upload: Upload, file: File, pieces: Iterable[bytes]) -> None:
        """Put the bytes to the server's URL, or send them in messages."""
        if upload.url:
            length = ("Content-Length", str(file.size))
            try:
                self._sent("PUT", upload.url, pieces, (_BYTES, length), is_own=False)
            except _Fault as fault:
                raise RemoteRefused(
                    f"the storage of {self.label} refuses the file: {fault.said}"
                ) from fault
            return
        url = f"{self.url}/api/upload"
        try:
            answer = self._sent("POST", url, self._messages(upload, file, pieces), (_JSON,))
        except _Fault as fault:
            raise self._refused(fault) from fault
        size = (_object(answer.body) or {}).get("size")
        if str(size) != str(file.size):
            shown = _printable(str(size))
            raise RemoteUnavailable(f"{self.label} has received {shown} of {file.size} bytes")

    def _messages(self, upload: Upload, file: File, pieces: Iterable[bytes]) -> Iterator[bytes]:
        info = {
            "buildId": str(file.build_id),
            "uploadId": upload.id,
            "type": self._TYPES[file.slot],
        }
        yield msgspec.json.encode({"info": info}) + b"\n"
        for piece in pieces:
            yield b'{"chunkData":"%s"}\n' % base64.b64encode(piece)

    def finish(self, upload: Upload, file: File) -> None:
        """Mark the upload as finished."""
        message = {
            "buildId": str(file.build_id),
            "uploadId": upload.id,
            "type": self._TYPES[file.slot],
        }
        try:
            self._call("/api/markuploadfinished", message)
        except _Fault as fault:
            # It also answers 404 for an unknown upload.
            raise RemoteRefused(f"{self.label} cannot finish the upload: {fault.said}") from fault


class Pyroscope(SymbolServer):
    """A Pyroscope server, over Connect with JSON."""

    name = "pyroscope"
    takes_executables = False
    least_quality = Quality.SYMTAB
    """Pyroscope asks debuginfod servers for missing files. It would keep a worse file for ever."""
    time_limit = "-debug-info.upload-timeout"
    _headers = (_JSON, ("Connect-Protocol-Version", "1"))

    _SERVICE: Final = "/debuginfo.v1alpha1.DebuginfoService/"
    _MOST_ID_BYTES: Final = 20
    _DISABLED: Final = "upload disabled"

    def misfit(self, build_id: BuildId, *, is_adopted: bool) -> str:
        """Return a reason for build IDs that Pyroscope does not look up: it takes GNU build IDs of
        at most 20 bytes.
        """
        if is_adopted:
            return "Pyroscope takes only files with a build ID of their own"
        if len(build_id) > self._MOST_ID_BYTES:
            return f"Pyroscope takes build IDs of at most {self._MOST_ID_BYTES} bytes"
        return ""

    def begin(self, file: File, *, resume: bool, replace: bool) -> Upload | Declined:
        """Ask the server, which also begins the upload."""
        is_whole = file.kind is not Kind.DEBUGINFO
        asked = {
            "gnuBuildId": str(file.build_id),
            "name": file.name,
            "type": "TYPE_EXECUTABLE_FULL" if is_whole else "TYPE_EXECUTABLE_NO_TEXT",
        }
        try:
            said = self._call(self._SERVICE + "ShouldInitiateUpload", {"file": asked})
        except _Fault as fault:
            raise self._refused(fault) from fault
        if self._wants(said):
            return Upload()
        declined = self._declined(said.get("reason"))
        if self._DISABLED in declined.why:
            raise RemoteDenied(f"{self.label} takes no files: set -debug-info.enabled=true there")
        # Another client may continue an upload that has begun.
        return Upload() if declined.is_busy and resume else declined

    def send(self, upload: Upload, file: File, pieces: Iterable[bytes]) -> None:
        """Send the bytes as they are."""
        url = f"{self.url}{self._SERVICE}Upload/{file.build_id}"
        try:
            self._sent("POST", url, pieces, (_BYTES, ("Content-Length", str(file.size))))
        except _Fault as fault:
            raise self._refused(fault) from fault

    def finish(self, upload: Upload, file: File) -> None:
        """Report to the server that the upload has finished."""
        message = {"gnuBuildId": str(file.build_id)}
        try:
            self._call(self._SERVICE + "UploadFinished", message)
        except _Fault as fault:
            raise self._refused(fault) from fault


_KINDS: Final[dict[str, Callable[[str, HttpClient], SymbolServer]]] = {
    Parca.name: Parca,
    Pyroscope.name: Pyroscope,
}


def symbol_server(
    kind: str, url: str, timeout_s: float, headers: tuple[tuple[str, str], ...]
) -> SymbolServer:
    """Return the server of a kind at a URL.

    Each request to it has the headers. Raises `UsageError`.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        parts, is_url = urllib.parse.urlsplit(""), False
    if parts.username or parts.password:
        raise UsageError(
            "all users of this host can see the password in the URL: put the header"
            " Authorization into a file for --headers-file"
        )
    if not is_url or parts.query or parts.fragment or not url.isprintable():
        raise UsageError(f"not the URL of a server: {url[:80]!r}; try https://HOST:PORT")
    with needs_extra("upstream"):
        from buildidfs.upstream.http_client import HttpClient
    return _KINDS[kind](url, HttpClient(timeout_s, headers))


def _object(body: bytes) -> dict[str, Any] | None:
    """Return the JSON object in an answer; None if there is none."""
    try:
        found = msgspec.json.decode(body or b"{}")
    except (msgspec.DecodeError, RecursionError):
        return None
    return _camel(found) if isinstance(found, dict) else None


def _camel(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with the JSON names of its fields; servers may send the names of the
    definition instead.
    """
    found = {}
    for name, value in message.items():
        first, *others = name.split("_")
        camel = first + "".join(map(str.capitalize, others))
        found[camel] = _camel(value) if isinstance(value, dict) else value
    return found


def _printable(text: str) -> str:
    return "".join(filter(str.isprintable, text))[:_SAID_CHARACTERS].strip()


def _shown(location: str) -> str:
    """Return scheme and host of a URL, because the rest may contain a secret."""
    parts = urllib.parse.urlsplit(location)
    return _printable(f"{parts.scheme}://{host_of(location)}") if parts.netloc else "another path"
