# SPDX-License-Identifier: Apache-2.0
"""Routes of the server, and the answer to each failure.

Only a verified answer may say that a file is absent, because a debuginfod client remembers the
absence for ten minutes. Such a client takes each error status for an absence, too. So if the store
cannot be read, the connection of such a client is reset, because the client does not remember a
reset. Other clients get a 5xx.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from buildidfs import __version__
from buildidfs.errors import BuildIdFsError
from buildidfs.serve import messages, metadata
from buildidfs.serve.debuginfod import Debuginfod
from buildidfs.serve.messages import RESET, SEARCHES, BadRequest, NotNow, Response, Waiting, text
from buildidfs.serve.symbolication import PATHS, Symbolication, failure
from buildidfs.watch import metrics

if TYPE_CHECKING:
    from collections.abc import Callable

    from buildidfs.serve.backend import Backend
    from buildidfs.serve.counters import ServerCounters
    from buildidfs.serve.messages import Answer, Request
    from buildidfs.serve.page.site import Page
    from buildidfs.upstream.agent import Agent

log = logging.getLogger(__name__)

_FORGETS: Final = b"elfutils"
"""The user agent of clients that take each error for the absence of a file."""

_METHODS: Final = b"GET, HEAD, OPTIONS"
_CORS: Final = messages.lines(
    (b"Access-Control-Allow-Origin", b"*"),
    (
        b"Access-Control-Expose-Headers",
        b"X-DEBUGINFOD-SIZE, X-DEBUGINFOD-FILE, X-DEBUGINFOD-ARCHIVE, ETag",
    ),
)
_ALLOW: Final = messages.lines((b"Allow", _METHODS))
_PREFLIGHT: Final = messages.lines(
    (b"Access-Control-Allow-Methods", b"POST, " + _METHODS),
    (b"Access-Control-Allow-Headers", b"cache-control, range, if-none-match, content-type"),
    (b"Access-Control-Max-Age", b"86400"),
)
_METRICS: Final = messages.lines((b"Content-Type", b"text/plain; version=0.0.4; charset=utf-8"))
_RETRY: Final = messages.lines((b"Retry-After", b"5"))


class Site:
    """Answers requests. `answer` must be called in the thread of the loop; its result in any
    thread.
    """

    def __init__(
        self,
        backend: Backend,
        counters: ServerCounters,
        pages: Page,
        agent: Agent | None,
    ) -> None:
        """``pages`` are the pages for people; ``agent`` fetches missing files, if there is one."""
        settings = backend.settings.serve
        home = settings.home_redirect.encode()
        self._home = messages.lines((b"Location", home)) if home else b""
        self._pages = pages
        self.counters = counters
        self._backend = backend
        self._debuginfod = Debuginfod(backend, agent)
        self._has_agent = agent is not None
        self.symbolication = Symbolication(backend, self._debuginfod)
        self._cors = settings.cors

    def most_body(self, target: bytes) -> int:
        """Return the maximum number of bytes in the body of a POST to a request target; 0 if it
        takes none.
        """
        path = target.partition(b"?")[0]
        if path in PATHS:
            return messages.MAX_BODY
        return self._pages.most_body(path)

    def refusal(self, target: bytes, status: int, message: str) -> Response:
        """Return the answer to a request that is not read to its end."""
        path = target.partition(b"?")[0]
        log.debug("%s: refused with %d: %s", path, status, message)
        return self._finished(self._refusal(path, status, message))

    def _refusal(self, path: bytes, status: int, message: str) -> Response:
        return (failure if _is_json(path) else text)(status, message)

    def overload(self, request: Request) -> Response:
        """Return the answer to be sent instead of one that would take too much memory."""
        return self._finished(self._failure(request, 503, "too many answers wait to be taken"))

    def answer(self, request: Request) -> Answer:
        """Return a response, or a function that makes it. Neither call raises."""
        answer = self._guarded(request, lambda: self._route(request))
        if isinstance(answer, Response):
            return self._finished(answer)
        later = answer

        def finish() -> Response:
            done = self._guarded(request, later)
            assert isinstance(done, Response)
            return self._finished(done)

        if isinstance(later, Waiting):
            refusal = self._failure(request, 503, "too many such requests wait already")
            refusal.kind = later.kind
            return Waiting(finish, later.lane, later.kind, self._finished(refusal))
        return finish

    def _finished(self, response: Response) -> Response:
        if self._cors:
            response.headers += _CORS
        return response

    def _guarded(self, request: Request, work: Callable[[], Answer]) -> Answer:
        try:
            return work()
        except BadRequest as error:
            return self._refusal(request.path, 400, str(error))
        except NotNow as error:
            return self._failure(request, 503, str(error))
        except (BuildIdFsError, OSError) as error:
            log.warning("%s: %s", _shown(request), error)
            return self._failure(request, 503, "the store cannot be read now")
        except Exception:
            log.exception("%s: a fault of this program", _shown(request))
            return self._failure(request, 500, "a fault of the server")

    def _failure(self, request: Request, status: int, message: str) -> Response:
        is_reset = request.header(b"user-agent").startswith(_FORGETS)
        answer = "reset" if is_reset else status
        log.debug("%s: %s, because %s", messages.path_of(request), answer, message)
        if is_reset:
            return Response(RESET)
        if _is_json(request.path):
            return failure(status, message)
        return text(status, message, _RETRY)

    def _route(self, request: Request) -> Answer:
        request.path, request.query = messages.parse_target(request.target)
        path = request.path
        if request.method == b"OPTIONS":
            return Response(204, b"", _ALLOW + (_PREFLIGHT if self._cors else b""))
        if path in PATHS:
            return self.symbolication.answer(request)
        takes_post = self._pages.most_body(path) > 0
        if request.method not in (b"GET", b"HEAD") and not (
            takes_post and request.method == b"POST"
        ):
            return text(405, "only GET, HEAD and OPTIONS", _ALLOW)
        if path.startswith(b"/buildid/"):
            return self._debuginfod.answer(request)
        if path == b"/metadata":
            return Waiting(lambda: self._metadata(request), SEARCHES, "metadata")
        if path == b"/metrics":
            return self._metrics
        if path == b"/healthz":
            return self._health
        if self._home and path == b"/":
            return text(302, "see the home page", self._home, kind="/")
        if (answer := self._pages.answer(request)) is not None:
            return answer
        if path == b"/":
            return text(200, f"buildidfs {__version__}", kind="/")
        if b"text/html" in request.header(b"accept") and not _is_json(path):
            return self._pages.no_such_page()
        return self._refusal(path, 404, "no such page")

    def _metadata(self, request: Request) -> Response:
        return metadata.answer(self._backend, request, is_all=not self._has_agent)

    def _metrics(self) -> Response:
        lines = [
            *self.counters.text(),
            "# HELP ready 1 if the server answers from the store that is there now.",
            "# TYPE ready gauge",
            f"ready {int(self._backend.is_current())}",
            "",
        ]
        of_store = metrics.of_store(self._backend.store, self._backend.settings.retention)
        text = "\n".join(lines).encode() + of_store
        return Response(200, text, _METRICS, "metrics")

    def _health(self) -> Response:
        """Return the answer for a load balancer. It is a success if the index is that of the store,
        and can be read.
        """
        self._backend.check()
        self._backend.store.stats()
        return text(200, "ok")


def _is_json(path: bytes) -> bool:
    """Return True if all answers to requests for a path are JSON."""
    return path in PATHS or path.startswith(b"/api/")


def _shown(request: Request) -> str:
    """Return a request as one line for the log."""
    target = request.target[:200].decode("ascii", "backslashreplace")
    return f"{request.method.decode('ascii', 'replace')} {ascii(target)[1:-1]}"
