# SPDX-License-Identifier: Apache-2.0
"""Requests for the page and its JSON: paths, forms, headers and limits.

The page shows only files and places that all users could read, but shares and counts include all
files. It shows nothing of the journal, because the journal does not record who may read a file. It
shows the build IDs that clients asked this server for without success, but neither the clients nor
look-ups in mounts. A request opens only files of the store and runs no program. The policy in the
headers allows no script, and a form on another site cannot upload a file.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from buildidfs import answers, names
from buildidfs.catalog.containers import Names
from buildidfs.catalog.survey import Surveyor
from buildidfs.profile.why import Explainer
from buildidfs.serve.messages import (
    PAGES,
    SEARCHES,
    BadRequest,
    Response,
    Waiting,
    lines,
    parse_query,
)
from buildidfs.serve.page import api, build_id, html, overview, search, upload
from buildidfs.serve.page.overview import Trends
from buildidfs.store.permissions import PUBLIC

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    import msgspec

    from buildidfs.model import BuildId
    from buildidfs.serve.backend import Backend
    from buildidfs.serve.messages import Answer, Request

_KEPT_S: Final = 2.0
"""Seconds after which the overview is made again."""

_POLICY: Final = (
    b"default-src 'none'; style-src 'self'; img-src data:; form-action 'self'; base-uri 'none';"
    b" frame-ancestors 'none'"
)
_SAFE: Final = lines(
    (b"X-Content-Type-Options", b"nosniff"),
    (b"Referrer-Policy", b"no-referrer"),
    (b"Cross-Origin-Opener-Policy", b"same-origin"),
)
_HTML: Final = _SAFE + lines(
    (b"Content-Type", b"text/html; charset=utf-8"),
    (b"Content-Security-Policy", _POLICY),
    (b"Cache-Control", b"no-cache"),
    (b"Vary", b"Accept"),
)
_JSON: Final = _SAFE + lines(
    (b"Content-Type", b"application/json"), (b"Cache-Control", b"no-cache")
)
_CSS: Final = _SAFE + lines(
    (b"Content-Type", b"text/css; charset=utf-8"), (b"Cache-Control", b"public, max-age=86400")
)
_MOST_HOST: Final = 255
_DROPS: Final = (b"/drop", b"/api/drop")


class Page:
    """The page over the store of one worker; a context manager with a thread that takes surveys."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._store = backend.store
        self._drops = backend.settings.serve.drop
        self._surveyor = Surveyor(backend.store)
        self._trends = Trends(backend.store)
        self._files = search.FileNameList(backend.store)
        self._kept: answers.Overview | None = None
        self._rendered: dict[bool, bytes] = {}
        self._kept_until = 0.0
        self._making = threading.Lock()

    def __enter__(self) -> Self:
        self._surveyor.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._surveyor.__exit__()

    def answer(self, request: Request) -> Answer | None:
        """Return the answer to a request; None if the request is not for the page. Raises
        `BadRequest`.
        """
        path = request.path
        is_api = path.startswith(b"/api/")
        if path == b"/":
            if b"text/html" not in request.header(b"accept"):
                return None
            return _later(lambda: self._overview(as_json=False), is_api)
        if path == b"/style.css":
            return Response(200, html.style(), _CSS, "page")
        if path == b"/api/openapi.json":
            return Response(200, api.description(), _JSON, "api")
        if path == b"/api/overview":
            return _later(lambda: self._overview(as_json=True), is_api)
        rest = path.removeprefix(b"/api") if is_api else path
        if rest == b"/drop" and self._drops:
            return self._drop(request, is_api)
        if rest == b"/search":
            query = parse_query(request.query)
            slow = query.get(b"symbols", b"") == b"1"
            return _later(lambda: self._search(query, slow, is_api), is_api, slow=slow)
        if rest.startswith(b"/id/"):
            return _later(lambda: self._build_id(request, rest[4:], is_api), is_api)
        if rest.startswith(b"/compare/"):
            compared = rest[len(b"/compare/") :]
            return _later(lambda: self._compare(compared, is_api), is_api, slow=True)
        if rest.startswith(b"/container/"):
            name = rest[len(b"/container/") :]
            return _later(lambda: self._container(name, is_api), is_api)
        return None

    # --- answers -----------------------------------------------------------------------------

    def no_such_page(self) -> Response:
        """Return the answer to a browser that asks for a path without a page."""
        return _problem("No such page", "this server has no page at that address", 404, False)

    def _overview(self, *, as_json: bool) -> Response:
        with self._making:
            if self._kept is None or time.monotonic() > self._kept_until:
                self._kept = self._new_overview()
                self._rendered.clear()
                self._kept_until = time.monotonic() + (_KEPT_S if self._kept.counted else 0)
            body = self._rendered.get(as_json)
            if body is None:
                kept = self._kept
                body = self._rendered[as_json] = (
                    api.encode(kept)
                    if as_json
                    else _page(
                        "overview.html",
                        o=kept,
                        refresh=kept.counted is None,
                        drops=self._drops,
                    )
                )
        return Response(200, body, _JSON if as_json else _HTML, "api" if as_json else "page")

    def _new_overview(self) -> answers.Overview:
        return overview.overview(
            self._store,
            self._surveyor.latest,
            retention=self._backend.settings.retention,
            misses=self._backend.misses.every(),
            history=self._trends.rows(),
        )

    def _build_id(self, request: Request, name: bytes, is_api: bool) -> Response:
        parsed = names.parse(name.lower())
        if parsed is None:
            raise BadRequest("not a build ID: two hexadecimal digits for each byte of it")
        found = build_id.page(self._store, parsed, Names(self._store))
        if found is None:
            return self._not_served(parsed, is_api)
        if is_api:
            return _json(found)
        return _html("build_id.html", p=found, base=_base(request))

    def _not_served(self, parsed: BuildId, is_api: bool) -> Response:
        """Return the same answer for an unknown build ID and for a private one."""
        self._backend.check()
        explained = Explainer(self._store, PUBLIC)
        found = answers.NotServed(parsed.hex(), explained.not_served(parsed))
        return _json(found, 404) if is_api else _html("not_served.html", 404, n=found)

    def _search(self, query: dict[bytes, bytes], symbols: bool, is_api: bool) -> Response:
        asked = query.get(b"q", b"").decode("utf-8", "replace")
        limit_s = search.SYMBOLS_S if symbols else search.LIMIT_S
        found = search.search(
            self._store, Names(self._store), self._files, asked, symbols=symbols, limit_s=limit_s
        )
        return _json(found) if is_api else _html("search.html", found=found, query=found.query)

    def _container(self, name: bytes, is_api: bool) -> Response:
        found = overview.container_page(self._store, name)
        if found is None:
            self._backend.check()
            error = "no container that every user may know has that name"
            return _problem("No such container", error, 404, is_api)
        return _json(found) if is_api else _html("container.html", c=found)

    def _compare(self, rest: bytes, is_api: bool) -> Response:
        parts = rest.split(b"/")
        parsed = names.parse(parts[0].lower())
        digests = [digest for each in parts[1:] if (digest := names.parse_digest(each))]
        if parsed is None or len(parts) != 3 or len(digests) != 2:
            raise BadRequest("give a build ID and the SHA-256 of two of its files")
        found = build_id.compared(self._store, parsed, *digests)
        if found is None:
            return self._not_served(parsed, is_api)
        return _json(found) if is_api else _html("compare.html", c=found)

    def most_body(self, path: bytes) -> int:
        """Return the largest body of a POST to a path in bytes; 0 if the path takes no POST."""
        return upload.MOST_BYTES if self._drops and path in _DROPS else 0

    def _drop(self, request: Request, is_api: bool) -> Answer:
        """Return the form for uploads, or the result of an upload."""
        if request.method != b"POST":
            if is_api:
                return _json(answers.Problem("this path takes only POST"), 405)
            return _html("drop.html")
        if request.header(b"sec-fetch-site") not in (b"", b"same-origin", b"none"):
            return _problem("Not uploaded", "a form of another site cannot upload", 400, is_api)

        def work() -> Response:
            try:
                content = upload.file_in(request.body, request.header(b"content-type"))
                found = upload.measure(self._store, content)
            except BadRequest as error:
                return _problem("The upload cannot be read", str(error), 400, is_api)
            return _json(found) if is_api else _html("dropped.html", d=found)

        return _later(work, is_api, slow=True)


def _later(work: Callable[[], Response], is_api: bool, *, slow: bool = False) -> Waiting:
    """Return work for a thread; ``slow`` work has a limit of its own, so that other work is not
    blocked.
    """
    return Waiting(work, SEARCHES if slow else PAGES, "api" if is_api else "page")


def _base(request: Request) -> str:
    """Return the URL of this server as the client wrote it."""
    host = request.header(b"host")[:_MOST_HOST].decode("ascii", "replace")
    return f"http://{quote(host, safe='.:[]-_')}" if host else "http://HOST:8002"


def _page(template: str, **values: object) -> bytes:
    shared = {
        "style": "",
        "style_hash": "",
        "style_version": html.style_version(),
        "refresh": False,
        "drops": False,
        "most": upload.MOST_BYTES,
        "query": "",
    }
    return html.render(template, **{**shared, **values})


def _html(template: str, status: int = 200, **values: object) -> Response:
    return Response(status, _page(template, **values), _HTML, "page")


def _problem(heading: str, error: str, status: int, is_api: bool) -> Response:
    if is_api:
        return _json(answers.Problem(error), status)
    return _html("problem.html", status, heading=heading, error=html.sentence(error) + ".")


def _json(value: msgspec.Struct, status: int = 200) -> Response:
    return Response(status, api.encode(value), _JSON, "api")
