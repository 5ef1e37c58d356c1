# SPDX-License-Identifier: Apache-2.0
"""Parca and Pyroscope as far as they take uploads, in memory, that count and can be made to fail.

Written from the definitions of their services, fields by name and number, and from what each
answers in which state: who may upload when, the reasons in its words, and its codes of failure.
Messages are JSON as protobuf defines it (a 64-bit number is text, a value that is the default may
be left out); a field that the definition does not have is refused, which theirs would overlook.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, NamedTuple

AUTHORIZATION = "Bearer secret-of-a-test"

FIRST = "First time we see this Build ID"
IN_PROGRESS = (
    "A previous upload is still in-progress and not stale yet (only stale uploads can be retried)."
)
EXISTS = "Debuginfo already exists and is not marked as invalid, therefore no new upload is needed."
IN_DEBUGINFOD = "Debuginfo exists in debuginfod, therefore no upload is necessary."
FORCED = "accepting it because it's requested to be forced."
DISABLED = "DebugInfo upload disabled"


class Asked(NamedTuple):
    """A request: method, path, and the number of bytes of its body."""

    method: str
    path: str
    size: int


class Place:
    """The place for a file. ``state`` is "uploading" or "uploaded"."""

    def __init__(self, upload_id: str, digest: str, about: dict[str, Any]) -> None:
        self.state = "uploading"
        self.upload_id = upload_id
        self.hash = digest
        self.about = about
        self.data: bytes | None = None


class SymbolServer(ThreadingHTTPServer):
    """A server on a port of its own. ``places`` may be changed at any time.

    ``fault`` is asked before each request is carried out, with its path: a status to answer with,
    -1 to drop the connection, 0 to go on. ``late_fault`` is asked after it, before the answer.
    ``requests`` has what was carried out. ``authorization`` has to come with each request, unless
    empty. ``cut_at`` ends uploads after so many bytes. With ``original_names`` answers have the
    names of the definitions, with underscores, which JSON of protobuf allows as well.
    """

    daemon_threads = True
    request_queue_size = 64
    handler: ClassVar[type[_Handler]]

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), self.handler)
        self.places: dict[tuple[str, str], Place] = {}
        self.fault: Callable[[str], int] = lambda path: 0
        self.late_fault: Callable[[str], int] = lambda path: 0
        self.requests: list[Asked] = []
        self.authorization = ""
        self.original_names = False
        self.cut_at = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        """The URL to configure."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Report a fault, unless a client was killed."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    def count(self, part: str = "") -> int:
        """The number of requests with a part of a path."""
        return sum(part in each.path for each in self.requests)

    def uploaded(self) -> dict[tuple[str, str], bytes]:
        """The files that may be used: all bytes are there, and it was said that they are."""
        with self.lock:
            return {
                key: place.data or b""
                for key, place in self.places.items()
                if place.state == "uploaded"
            }


def _snake(message: dict[str, Any]) -> dict[str, Any]:
    return {
        re.sub("[A-Z]", lambda found: "_" + found[0].lower(), name): (
            _snake(value) if isinstance(value, dict) else value
        )
        for name, value in message.items()
    }


class _Failure(Exception):
    """A failure of the protocol: the HTTP status, the code of gRPC or Connect, and a text."""

    def __init__(self, status: int, code: int | str, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.body = {"code": code, "message": text}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: SymbolServer

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def _serve(self) -> None:
        fault = self.server.fault(self.path)
        if fault < 0:
            self.close_connection = True
            return
        body = self._body()
        if body is None:
            self.close_connection = True
            return
        if fault:
            self._answer(fault, b"fault")
            return
        with self.server.lock:
            self.server.requests.append(Asked(self.command, self.path, len(body)))
            try:
                status, answer = 200, self._carried_out(body)
            except _Failure as failure:
                status, answer = failure.status, failure.body
        late = self.server.late_fault(self.path)
        if late:
            self.close_connection = True
            return
        if isinstance(answer, bytes):
            self._answer(status, answer)
        else:
            shown = _snake(answer) if self.server.original_names else answer
            self._answer(status, json.dumps(shown).encode(), "application/json")

    do_GET = do_POST = do_PUT = _serve

    def _carried_out(self, body: bytes) -> dict[str, Any] | bytes:
        raise NotImplementedError

    def _body(self) -> bytes | None:
        """The body; None if the connection is to be cut within it."""
        body = b""
        for piece in self._pieces():
            body += piece
            if self.server.cut_at and len(body) >= self.server.cut_at:
                return None
        return body

    def _pieces(self) -> Iterator[bytes]:
        if self.headers.get("Transfer-Encoding") != "chunked":
            left = int(self.headers.get("Content-Length") or 0)
            while left:
                piece = self.rfile.read(min(left, 1 << 16))
                if not piece:
                    raise ConnectionResetError("the client has gone")
                left -= len(piece)
                yield piece
            return
        while size := int(self.rfile.readline() or b"x", 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def _answer(self, status: int, body: bytes, kind: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if 300 <= status < 400:
            self.send_header("Location", "https://elsewhere.invalid/path?secret")
        self.end_headers()
        self.wfile.write(body)

    def _checked(self) -> None:
        wanted = self.server.authorization
        if wanted and self.headers.get("Authorization") != wanted:
            raise _Failure(401, 16, "unauthorized")

    def _message(self, text: bytes, fields: dict[str, Any]) -> dict[str, Any]:
        """A message, with the defaults of its fields. A default says of which type a field is."""
        given = json.loads(text)
        for name, value in given.items():
            if name not in fields or not isinstance(value, type(fields[name])):
                raise _Failure(400, 3, f"unknown field or type: {name}")
        return {**fields, **given}


# --- Parca -----------------------------------------------------------------------------------


class ParcaServer(SymbolServer):
    """The service parca.debuginfo.v1alpha1.DebuginfoService, by its HTTP interface below /api.

    With ``signed`` it wants bytes by PUT at a URL of a storage, which is the same server here. If
    ``is_late``, it says of uploads that they took longer than it reads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.signed = False
        self.is_late = False
        self.debuginfod: set[str] = set()
        self.max_size = 1_000_000_000


_PARCA_NAMED = {"buildId": "", "hash": "", "force": False, "type": "", "buildIdType": ""}
_PARCA_TYPES = ("DEBUGINFO_TYPE_DEBUGINFO_UNSPECIFIED", "DEBUGINFO_TYPE_EXECUTABLE")
_PARCA_IDS = ("BUILD_ID_TYPE_GNU", "BUILD_ID_TYPE_HASH")


class _Parca(_Handler):
    server: ParcaServer

    def _carried_out(self, body: bytes) -> dict[str, Any] | bytes:
        if self.command == "PUT":
            return self._put(body)
        if self.command != "POST" or not self.path.startswith("/api/"):
            raise _Failure(404, 5, "not found")
        self._checked()
        act = getattr(self, f"_{self.path.removeprefix('/api/')}", None)
        if act is None:
            raise _Failure(404, 5, "not found")
        answer: dict[str, Any] | bytes = act(body)
        return answer

    def _place(self, message: dict[str, Any]) -> Place | None:
        return self.server.places.get((message["buildId"], message["type"]))

    def _shouldinitiateupload(self, body: bytes) -> dict[str, Any]:
        return self._decision(self._message(body, _PARCA_NAMED))

    def _decision(self, asked: dict[str, Any]) -> dict[str, Any]:
        if len(asked["buildId"]) <= 2:
            raise _Failure(400, 3, "unexpectedly short input")
        assert asked["type"] in _PARCA_TYPES
        assert asked["buildIdType"] in _PARCA_IDS
        place = self._place(asked)
        if place is None:
            if asked["buildId"] in self.server.debuginfod:
                return {"shouldInitiateUpload": False, "reason": IN_DEBUGINFOD}
            return {"shouldInitiateUpload": True, "reason": FIRST}
        if asked["force"]:
            return {"shouldInitiateUpload": True, "reason": FORCED}
        reason = EXISTS if place.state == "uploaded" else IN_PROGRESS
        return {"shouldInitiateUpload": False, "reason": reason}

    def _initiateupload(self, body: bytes) -> dict[str, Any]:
        asked = self._message(body, {**_PARCA_NAMED, "size": ""})
        if not asked["hash"] or not int(asked["size"]):
            raise _Failure(400, 3, "hash and size must be set")
        decision = self._decision({name: asked[name] for name in _PARCA_NAMED})
        if not decision["shouldInitiateUpload"]:
            raise _Failure(
                400,
                9,
                "upload should not have been attempted to be initiated, a previous check should"
                f" have failed with: {decision['reason']}",
            )
        if int(asked["size"]) > self.server.max_size:
            raise _Failure(
                400,
                3,
                f"upload size {asked['size']} exceeds maximum allowed size {self.server.max_size}",
            )
        upload_id = str(uuid.uuid4())
        key = (asked["buildId"], asked["type"])
        self.server.places[key] = Place(upload_id, asked["hash"], asked)
        told = {"buildId": key[0], "uploadId": upload_id, "type": key[1], "signedUrl": ""}
        if self.server.signed:
            told["uploadStrategy"] = "UPLOAD_STRATEGY_SIGNED_URL"
            told["signedUrl"] = f"{self.server.url}/bucket/{upload_id}?signature=secret"
        else:
            told["uploadStrategy"] = "UPLOAD_STRATEGY_GRPC"
        return {"uploadInstructions": told}

    def _put(self, body: bytes) -> bytes:
        found = re.fullmatch(r"/bucket/([\w-]+)\?signature=secret", self.path)
        assert found is not None
        assert "Authorization" not in self.headers, "the storage gets the keys of the server"
        assert self.headers["Content-Length"] == str(len(body)), "a storage wants the length"
        for place in self.server.places.values():
            if place.upload_id == found[1]:
                place.data = body
        return b""

    def _upload(self, body: bytes) -> dict[str, Any]:
        if self.server.signed:
            raise _Failure(501, 12, "signed URL uploads are the only supported upload strategy")
        if self.server.is_late:
            raise _Failure(400, 3, "read tcp 127.0.0.1:7070->127.0.0.1:43288: i/o timeout")
        first, *others = body.splitlines()
        info = self._message(first, {"info": {}})["info"]
        assert info.keys() == {"buildId", "uploadId", "type"}
        place = self._place(info)
        if place is None:
            raise _Failure(400, 9, "metadata not found")
        if place.upload_id != info["uploadId"]:
            raise _Failure(400, 3, "the upload ID does not match")
        pieces = [self._message(each, {"chunkData": ""})["chunkData"] for each in others]
        assert all(len(piece) < 64 << 20 for piece in pieces), "gRPC takes 64 MiB at a time"
        place.data = b"".join(base64.b64decode(piece, validate=True) for piece in pieces)
        return {"buildId": info["buildId"], "size": str(len(place.data))}

    def _markuploadfinished(self, body: bytes) -> dict[str, Any]:
        asked = self._message(body, {"buildId": "", "uploadId": "", "type": ""})
        place = self._place(asked)
        if place is None:
            raise _Failure(404, 5, "no debuginfo metadata found for build id")
        if place.upload_id != asked["uploadId"]:
            raise _Failure(400, 3, "upload id mismatch")
        place.state = "uploaded"
        return {}


ParcaServer.handler = _Parca


# --- Pyroscope ---------------------------------------------------------------------------------


class PyroscopeServer(SymbolServer):
    """The service debuginfo.v1alpha1.DebuginfoService, by Connect with JSON."""

    def __init__(self) -> None:
        super().__init__()
        self.enabled = True
        self.max_size = 1 << 30


_SERVICE = "/debuginfo.v1alpha1.DebuginfoService/"
_PYROSCOPE_FILE = {"gnuBuildId": "", "goBuildId": "", "otelFileId": "", "name": "", "type": ""}


class _Pyroscope(_Handler):
    server: PyroscopeServer

    def _carried_out(self, body: bytes) -> dict[str, Any] | bytes:
        method, _, rest = self.path.removeprefix(_SERVICE).partition("/")
        if self.command != "POST" or not self.path.startswith(_SERVICE):
            raise _Failure(404, "not_found", "404 page not found")
        self._checked()
        if method == "Upload":
            return self._upload(rest, body)
        assert self.headers["Content-Type"] == "application/json"
        if method == "ShouldInitiateUpload":
            return self._should(self._message(body, {"file": {}})["file"])
        if method == "UploadFinished":
            return self._finished(self._message(body, {"gnuBuildId": ""})["gnuBuildId"])
        raise _Failure(404, "not_found", "404 page not found")

    def _checked_id(self, build_id: str) -> tuple[str, str]:
        if re.fullmatch(r"[a-fA-F0-9]{2,40}", build_id) is None:
            raise _Failure(400, "invalid_argument", f'invalid gnuBuildID "{build_id}"')
        return build_id, "exe"

    def _should(self, file: dict[str, Any]) -> dict[str, Any]:
        assert file.keys() <= _PYROSCOPE_FILE.keys()
        if not self.server.enabled:
            return {"reason": DISABLED}  # a value that is the default is left out
        key = self._checked_id(file["gnuBuildId"])
        if file["type"] not in ("TYPE_EXECUTABLE_FULL", "TYPE_EXECUTABLE_NO_TEXT"):
            raise _Failure(400, "invalid_argument", "init.File.Type is not valid")
        place = self.server.places.get(key)
        if place is not None:
            return {"reason": EXISTS if place.state == "uploaded" else IN_PROGRESS}
        self.server.places[key] = Place("", "", file)
        return {"shouldInitiateUpload": True, "reason": FIRST}

    def _upload(self, build_id: str, body: bytes) -> bytes:
        place = self.server.places.get(self._checked_id(build_id))
        if place is None or place.state != "uploading":
            raise _Failure(412, "", "no pending upload for this build ID")
        if len(body) > self.server.max_size:
            raise _Failure(500, "", "upload failed")
        place.data = body
        return b""

    def _finished(self, build_id: str) -> dict[str, Any]:
        place = self.server.places.get(self._checked_id(build_id))
        if place is None:
            raise _Failure(404, "not_found", "no upload metadata found")
        if place.state != "uploading":
            raise _Failure(400, "failed_precondition", "upload is not in uploading state")
        if place.data is None:
            raise _Failure(400, "failed_precondition", "no uploaded file found")
        place.state = "uploaded"
        return {}


PyroscopeServer.handler = _Pyroscope


@contextlib.contextmanager
def symbol_server(kind: str) -> Iterator[SymbolServer]:
    """Serve as ``parca`` or ``pyroscope`` while the block runs."""
    server = ParcaServer() if kind == "parca" else PyroscopeServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
