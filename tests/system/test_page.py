# SPDX-License-Identifier: Apache-2.0
"""The page of ``buildidfs serve`` and its JSON: what they tell, to whom, and how it is written."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from buildidfs.store import Store
from tests.support.harness.mounts import BuildIdFs
from tests.support.harness.waiting import until
from tests.support.servers import pagestore
from tests.support.servers.openapi import faults
from tests.support.servers.pagestore import COMPLETE, EVIL, HOSTILE, PLAIN, PRIVATE, STRIPPED, TWICE
from tests.support.servers.serving import Server, serving

pytestmark = pytest.mark.root

BROWSER = "text/html,application/xhtml+xml"
UNKNOWN = bytes([0xCF]) * 20
VOID = {"meta", "link", "input", "br", "img", "hr"}
PAGES = (
    "/",
    "/search",
    "/search?q=lib",
    "/search?q=%3Cscript%3E",
    f"/id/{COMPLETE.hex()}",
    f"/id/{HOSTILE.hex()}",
    f"/id/{TWICE.hex()}",
    f"/id/{UNKNOWN.hex()}",
    "/container/3f2a91c05b77",
    "/container/0badc0ffee00",
    "/container/nothing",
)


@dataclasses.dataclass(frozen=True)
class Site:
    """A server, and its store."""

    server: Server
    store: Path
    buildidfs: BuildIdFs

    def json(self, target: str, status: int = 200) -> Any:
        """The answer of the API."""
        reply = self.server.ask(target)
        assert reply.status == status, reply.body
        assert reply.headers["content-type"] == "application/json"
        return json.loads(reply.body)

    def html(self, target: str) -> str:
        """A page, as a browser gets it."""
        return self.server.ask(target, Accept=BROWSER).body.decode()


@pytest.fixture(scope="module")
def site(scratch: Path) -> Iterator[Site]:
    home = scratch / "page"
    home.mkdir()
    buildidfs = BuildIdFs(home)
    pagestore.make(buildidfs.store, many=60)
    with serving(buildidfs.store, config="[serve]\nrate = 0\n") as server:
        site = Site(server, buildidfs.store, buildidfs)
        until(lambda: site.json("/api/overview")["counted"], "the survey of the server")
        yield site


class _Reader(HTMLParser):
    """Checks that elements are closed in order, and collects what may be dangerous."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.faults: list[str] = []
        self.text = ""
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if len(names) != len(set(names)):
            self.faults.append(f"{tag} has an attribute twice")
        if tag in ("script", "img", "iframe", "style") or "style" in names:
            self.faults.append(f"there is {tag} {names}")
        self.faults += [f"{tag} has {name}" for name in names if name.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}> closes another element")

    def handle_data(self, data: str) -> None:
        self.text += data


def read(page: str) -> _Reader:
    """Read a page; it is well-formed, and has nothing that runs."""
    reader = _Reader()
    reader.feed(page)
    reader.close()
    assert reader.faults == []
    assert reader.open == []
    assert len(reader.ids) == len(set(reader.ids))
    return reader


# --- the form of all pages ------------------------------------------------------------------------


@pytest.mark.parametrize("target", PAGES)
def test_page_is_well_formed_and_nothing_in_it_runs(site: Site, target: str) -> None:
    reply = site.server.ask(target, Accept=BROWSER)
    assert reply.status == (404 if target.endswith((UNKNOWN.hex(), "nothing")) else 200)
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert reply.headers["x-content-type-options"] == "nosniff"
    text = read(reply.body.decode()).text
    assert not {each for each in text if not each.isprintable()} - set("\n")


def test_browser_gets_a_page_for_an_address_without_one(site: Site) -> None:
    reply = site.server.ask("/nope", Accept=BROWSER)
    assert reply.status == 404
    page = reply.body.decode()
    assert "No such page" in read(page).text
    assert 'action="/search"' in page
    assert '<a href="/">' in page
    plain = site.server.ask("/nope")
    assert (plain.status, plain.body) == (404, b"no such page\n")


def test_names_of_strangers_are_shown_as_they_are(site: Site) -> None:
    page = read(site.html(f"/id/{HOSTILE.hex()}"))
    assert "/app/<script>alert(1)</script>\"'&\\x1b[31m" in page.text
    assert "<b>evil</b>" in page.text
    assert '"><img src=x onerror=alert(1)>' in page.text


def test_json_has_nothing_that_a_terminal_obeys(site: Site) -> None:
    body = site.server.ask(f"/api/id/{HOSTILE.hex()}").body
    assert all(each.isprintable() or each == "\n" for each in body.decode())
    assert json.loads(body)["places"][0]["path"] == EVIL.decode("utf-8", "replace")


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("/api/id/zz", 400),
        ("/api/none", 404),
        ("/api/search?q=%zz", 400),
        ("/api/" + "x" * 20_000, 414),
    ],
)
def test_errors_of_the_api_are_json(site: Site, target: str, status: int) -> None:
    reply = site.server.ask(target)
    assert (reply.status, reply.headers["content-type"]) == (status, "application/json")
    assert list(json.loads(reply.body)) == ["error"]


def test_debuginfod_client_gets_text_at_the_root(site: Site) -> None:
    assert site.server.ask("/").body.startswith(b"buildidfs ")


@pytest.mark.parametrize("target", PAGES)
def test_head_is_the_page_without_the_body(site: Site, target: str) -> None:
    whole = site.server.ask(target, Accept=BROWSER)
    head = site.server.ask(target, "HEAD", Accept=BROWSER)
    assert (head.status, head.body) == (whole.status, b"")


# --- the overview ---------------------------------------------------------------------------------


def test_overview_says_what_the_commands_say(site: Site) -> None:
    told = site.json("/api/overview")
    rows = [json.loads(line) for line in site.buildidfs("containers", "--json").out.splitlines()]
    ours = {each["label"]: each for each in told["containers"]}
    public = [row for row in rows if row["container"] != "aaaaaaaaaaaa"]
    assert set(ours) == {row["container"] for row in public}
    for row in public:
        its = ours[row["container"]]
        assert its["coverage"] == {"build_ids": row["build_ids"], **row["coverage"]}
        assert (its["bytes"], its["image"]) == (row["bytes"], row["image"] or "")
    stats = json.loads(site.buildidfs("stats", "--json").out)
    assert told["store"]["build_ids"] == stats["build_ids"]
    assert told["store"]["stored_bytes"] == stats["stored_bytes"]


def test_overview_counts_what_is_missing_with_its_remedy(site: Site) -> None:
    missing = site.json("/api/overview")["missing"]
    counts = {each["finding"]["reason"]: each["count"] for each in missing["reasons"]}
    assert counts == {"stripped": 21, "no-debuginfo": 23, "no-symbols": 1}
    assert all(each["finding"]["remedy"] for each in missing["reasons"])
    worst = missing["build_ids"][0]
    assert (worst["build_id"], worst["containers"]) == (STRIPPED.hex(), 2)
    page = read(site.html("/"))
    assert "21 build IDs" in page.text
    assert "/app/server" in page.text


def test_lookups_in_vain_are_told_without_their_clients(site: Site) -> None:
    wanted = bytes([0xCE]) * 20
    for build_id in (wanted, PRIVATE, wanted, wanted):
        assert site.server.ask(f"/buildid/{build_id.hex()}/debuginfo").status == 404
    assert site.server.ask(f"/buildid/{PRIVATE.hex()}/executable").status == 404
    assert site.server.ask(f"/buildid/{PLAIN.hex()}/debuginfo").status == 404

    def asked() -> dict[str, Any]:
        rows = site.json("/api/overview")["missing"]["asked"]
        return {row["build_id"]: row for row in rows}

    until(
        lambda: {wanted.hex(), PLAIN.hex(), PRIVATE.hex()} <= asked().keys(),
        "the overview to be made again",
    )
    found = asked()
    assert found[wanted.hex()]["asked"] == 3
    assert found[wanted.hex()]["wanted"] == ["debuginfo"]
    assert found[wanted.hex()]["reason"] == "not-served"
    assert found[PLAIN.hex()]["reason"] == "no-debuginfo"
    private = found[PRIVATE.hex()]
    assert (private["reason"], private["asked"]) == ("not-served", 2)
    assert private["wanted"] == ["executable", "debuginfo"]
    assert "127.0.0.1" not in json.dumps(found)


def test_history_of_thirty_days_is_plotted(site: Site) -> None:
    assert "There is no history yet" in site.html("/")
    with Store.open(site.store) as store:
        pagestore.remember(store)
    until(lambda: site.json("/api/overview")["history"], "the history in the overview")
    told = site.json("/api/overview")
    assert 300 < len(told["history"]) <= 361
    shares = [each["symbols"] for each in told["history"]]
    assert (shares[0], shares[-1]) == (0.4, 0.749)
    assert sum(each["lost"] for each in told["history"]) == 40 * 71
    cart = next(each for each in told["containers"] if each["label"] == "3f2a91c05b77")
    assert 50 < len(cart["trend"]) <= 61
    page = site.html("/")
    read(page)
    assert "Symbols went from 40.0 % to 74.9 %" in page
    assert page.count('class="plot"') == 3
    assert page.count('class="spark"') == 2


# --- a build ID -----------------------------------------------------------------------------------


@pytest.mark.parametrize("build_id", [COMPLETE, STRIPPED, PLAIN, HOSTILE])
def test_page_of_a_build_id_gives_the_reasons_of_why(site: Site, build_id: bytes) -> None:
    told = site.json(f"/api/id/{build_id.hex()}")
    said = json.loads(site.buildidfs("why", build_id.hex(), "--json").out)
    assert [each["reason"] for each in told["findings"]] == [
        each["reason"] for each in said["findings"]
    ]
    assert told["findings"][0]["why"] == said["findings"][0]["why"]
    assert told["findings"][0]["remedy"] == said["findings"][0]["remedy"]


def test_page_of_a_build_id_says_what_is_missing_if_anything_is(site: Site) -> None:
    assert "What is missing" in site.html(f"/id/{STRIPPED.hex()}")
    assert "issing" not in site.html(f"/id/{COMPLETE.hex()}")


def test_page_of_a_build_id_has_the_facts_of_show(site: Site) -> None:
    told = site.json(f"/api/id/{TWICE.hex()}")
    said = json.loads(site.buildidfs("show", TWICE.hex(), "--json").out)
    fields = ("kind", "sha256", "size", "quality", "trust", "standing", "served", "why", "aliases")
    assert [[each[name] for name in fields] for each in told["variants"]] == [
        [each[name] for name in fields] for each in said["variants"]
    ]
    assert [each["path"] for each in told["places"]] == [each["path"] for each in said["origins"]]
    assert told["missing"] == said["missing"]
    assert told["conflicts"] == ["2 files have this build ID as executable"]
    assert {each["name"] for each in told["sections"]} >= {".text", ".rodata"}


def test_downloads_of_a_build_id_are_there(site: Site) -> None:
    told = site.json(f"/api/id/{COMPLETE.hex()}")
    assert [each["what"] for each in told["downloads"]] == ["executable", "debuginfo"]
    for each in told["downloads"]:
        reply = site.server.ask(each["url"])
        assert (reply.status, len(reply.body)) == (200, each["bytes"])


@pytest.mark.parametrize("prefix", ["/id/", "/api/id/"])
def test_private_build_id_has_the_answer_of_an_unknown_one(site: Site, prefix: str) -> None:
    private = site.server.ask(prefix + PRIVATE.hex())
    unknown = site.server.ask(prefix + UNKNOWN.hex())
    assert (private.status, unknown.status) == (404, 404)
    assert private.body.replace(b"c4", b"cf") == unknown.body


@pytest.mark.parametrize(
    "target",
    [
        "/",
        "/api/overview",
        "/search?q=secret",
        "/api/search?q=secret-tool",
        "/api/search?q=/home",
        "/api/search?q=hidden",
        f"/api/search?q={PRIVATE.hex()}",
        "/api/search?q=*secret*",
        "/api/container/aaaaaaaaaaaa",
        "/container/hidden",
    ],
)
def test_nothing_tells_of_a_private_file(site: Site, target: str) -> None:
    body = site.html(target)
    for word in ("/home/alice", "aaaaaaaaaaaa", "example/hidden"):
        assert word not in body.replace(f'value="{word}"', "")
    assert not target.startswith("/api/search") or json.loads(body)["hits"] == []


@pytest.mark.parametrize("text", ["c1", "zz" * 20, "", "c1" * 121, "..%2f..%2fetc%2fpasswd"])
def test_page_of_what_is_no_build_id_is_refused(site: Site, text: str) -> None:
    assert site.server.ask(f"/id/{text}").status == 400


# --- search ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "build_id"),
    [
        (STRIPPED.hex(), STRIPPED),
        (STRIPPED.hex()[:9], STRIPPED),
        (STRIPPED.hex().upper(), STRIPPED),
        ("server", STRIPPED),
        ("/app/server", STRIPPED),
        ("/app", STRIPPED),
        ("libpl", PLAIN),
        ("plain.s", PLAIN),
        ("*plain*", PLAIN),
        ("/usr/bin/", COMPLETE),
    ],
)
def test_search_finds_files(site: Site, query: str, build_id: bytes) -> None:
    found = site.json(f"/api/search?q={quote(query)}")
    assert build_id.hex() in [hit["build_id"] for hit in found["hits"]]


def test_search_by_sha256_finds_the_file(site: Site) -> None:
    digest = site.json(f"/api/id/{PLAIN.hex()}")["variants"][0]["sha256"]
    for query in (digest, f"sha256:{digest}"):
        hits = site.json(f"/api/search?q={query}")["hits"]
        assert [hit["build_id"] for hit in hits] == [PLAIN.hex()]


@pytest.mark.parametrize("query", ["cart", "shop/cart-7d9f", "3f2a91", "example/cart"])
def test_search_finds_containers(site: Site, query: str) -> None:
    hits = site.json(f"/api/search?q={quote(query)}")["hits"]
    assert "3f2a91c05b77" in [hit["path"] for hit in hits if hit["kind"] == "container"]
    page = read(site.html(f"/search?q={quote(query)}"))
    assert "shop/cart-7d9f/cart" in page.text


def test_search_for_a_symbol_looks_into_files_if_asked_to(site: Site) -> None:
    found = site.json("/api/search?q=plain_function")
    assert found["hits"] == []
    assert "symbols" not in found["searched"]
    assert "/search?q=plain_function&amp;symbols=1" in site.html("/search?q=plain_function")
    found = site.json("/api/search?q=plain_function&symbols=1")
    assert [(hit["build_id"], hit["why"]) for hit in found["hits"]] == [(PLAIN.hex(), "symbol")]
    assert site.json("/api/search?q=plain_funct&symbols=1")["hits"] == []
    functions = site.json(f"/api/id/{PLAIN.hex()}")["functions"]
    assert functions == [{"name": "plain_function", "address": 0x1000, "size": 16}]


def test_slow_searches_leave_places_for_other_pages(site: Site) -> None:
    with ThreadPoolExecutor(24) as executor:
        target = "/api/search?q=no_such_function&symbols=1"
        slow = [executor.submit(site.server.ask, target) for _ in range(48)]
        pages = [site.server.ask("/search?q=server").status for _ in range(20)]
        statuses = {each.result().status for each in slow}
    assert pages == [200] * 20
    assert 200 in statuses <= {200, 503}


def test_search_has_bounds(site: Site) -> None:
    found = site.json("/api/search?q=lib")
    assert len(found["hits"]) == 50
    assert not found["complete"]
    assert site.json(f"/api/search?q={'x' * 6000}")["hits"] == []


def test_search_without_hits_says_where_it_looked(site: Site) -> None:
    page = read(site.html("/search?q=no-such-thing"))
    assert "Looked at: build IDs, paths, containers." in page.text


# --- containers, comparison, description ----------------------------------------------------------


def test_container_has_its_files_the_worst_first(site: Site) -> None:
    told = site.json("/api/container/77aa01bc9d10")
    reasons = [each["reason"] for each in told["files"]]
    assert told["files_total"] == len(reasons) == 32
    assert reasons == sorted(reasons, key=["stripped", "no-debuginfo", ""].index)
    assert site.json("/api/container/shop%2Fcart-7d9f")["container"]["label"] == "3f2a91c05b77"
    assert site.json("/api/container/nothing", 404)["error"]


def test_two_variants_are_compared(site: Site) -> None:
    one, other = site.json(f"/api/id/{TWICE.hex()}")["variants"]
    target = f"/compare/{TWICE.hex()}/{one['sha256']}/{other['sha256']}"
    told = site.json(f"/api{target}")
    assert (told["left"]["served"], told["right"]["served"]) == (True, False)
    names = [(each["what"], each["name"]) for each in told["differences"]]
    assert ("section", ".rodata") in names
    assert ("section", ".text") not in names
    assert ("fact", "trust") in names
    assert ".rodata" in read(site.html(target)).text
    wrong = f"/api/compare/{TWICE.hex()}/{one['sha256']}/{'0' * 64}"
    assert site.json(wrong, 404)["findings"][0]["reason"] == "not-served"
    assert site.server.ask(f"/compare/{TWICE.hex()}/{one['sha256']}").status == 400


def test_api_is_what_its_description_says(site: Site) -> None:
    described = site.json("/api/openapi.json")
    assert described["openapi"].startswith("3.1")
    one, other = (each["sha256"] for each in site.json(f"/api/id/{TWICE.hex()}")["variants"])
    values = {
        "id": TWICE.hex(), "name": "77aa01bc9d10", "left": one, "right": other,
    }  # fmt: skip
    for path, item in described["paths"].items():
        if "get" not in item:
            continue
        target = path.format(**values) + ("?q=lib" if path == "/api/search" else "")
        schema = item["get"]["responses"]["200"]["content"]["application/json"]["schema"]
        assert faults(site.json(target), schema, described["components"]["schemas"]) == []
