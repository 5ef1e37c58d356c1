# SPDX-License-Identifier: Apache-2.0
"""The page in a browser: axe-core finds nothing wrong, and nothing is wider than the window.

``make test-page`` installs the browser and axe-core. The pictures are in ``BUILDIDFS_PICTURES``, if
that is set, for people to look at.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildidfs.store import Store
from tests.support.clients.browser import Browser, browsing
from tests.support.clients.commands import ROOT
from tests.support.elf.elfwriter import TEXT, elf_file
from tests.support.harness.mounts import BuildIdFs
from tests.support.harness.waiting import until
from tests.support.servers import pagestore
from tests.support.servers.pagestore import COMPLETE, HOSTILE, STRIPPED, TWICE
from tests.support.servers.serving import Server, serving

AXE = ROOT / ".venv/axe/node_modules/axe-core/axe.min.js"
PAGES = {
    "overview": "/",
    "build-id": f"/id/{COMPLETE.hex()}",
    "conflict": f"/id/{TWICE.hex()}",
    "hostile": f"/id/{HOSTILE.hex()}",
    "not-served": f"/id/{'cf' * 20}",
    "search": "/search?q=lib",
    "search-empty": "/search",
    "search-in-vain": "/search?q=nothing-like-it",
    "search-for-long-word": f"/search?q={'x' * 150}",
    "container": "/container/3f2a91c05b77",
    "compare": "",
    "drop": "/drop",
}


@pytest.fixture(scope="module")
def server(scratch: Path) -> Iterator[Server]:
    home = scratch / "browser"
    home.mkdir()
    buildidfs = BuildIdFs(home)
    pagestore.make(buildidfs.store, many=60)
    with Store.open(buildidfs.store) as store:
        pagestore.remember(store)
        variants = store.index.variants(store.index.ordinal(TWICE) or 0, 1)
    digests = "/".join(each.digest.hex() for each in variants)
    PAGES["compare"] = f"/compare/{TWICE.hex()}/{digests}"
    with serving(buildidfs.store, "--drop", config="[serve]\nrate = 0\n") as server:
        server.ask(f"/buildid/{'ab' * 20}/debuginfo")
        until(lambda: STRIPPED.hex().encode() in server.ask("/api/overview").body, "the survey")
        yield server


@pytest.fixture(scope="module")
def browser(scratch: Path) -> Iterator[Browser]:
    with browsing(scratch) as browser:
        yield browser


@pytest.mark.root
@pytest.mark.client
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("name", PAGES)
def test_page_is_for_everybody(
    server: Server, browser: Browser, name: str, width: int, dark: bool
) -> None:
    browser.show(f"{server.url}{PAGES[name]}", width=width, dark=dark)
    assert browser.run("document.documentElement.scrollWidth") == width
    background = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(15, 19, 24)") is dark
    assert browser.violations(AXE.read_text()) == []
    assert [text for text in browser.complaints if "404" not in text] == []
    if pictures := os.environ.get("BUILDIDFS_PICTURES"):
        scheme = "dark" if dark else "light"
        browser.picture(Path(pictures) / f"{name}-{width}-{scheme}.png")


@pytest.mark.root
@pytest.mark.client
def test_search_form_leads_to_the_result(server: Server, browser: Browser) -> None:
    browser.show(server.url, width=1440, dark=False)
    assert browser.run("document.scripts.length") == 0
    browser.run("document.querySelector('input[type=search]').value = 'server'")
    browser.follow("document.querySelector('form').submit()")
    assert browser.run("location.pathname + location.search") == "/search?q=server"
    assert "/app/server" in browser.run("document.body.innerText")


@pytest.mark.root
@pytest.mark.client
def test_upload_leads_to_the_coverage_of_the_file(
    server: Server, browser: Browser, tmp_path: Path
) -> None:
    upload = tmp_path / "upload"
    upload.write_bytes(elf_file([TEXT], build_id=STRIPPED))
    browser.show(f"{server.url}/drop", width=390, dark=False)
    browser.choose("input[type=file]", upload)
    browser.follow("document.querySelector('form.drop').submit()")
    assert browser.run("document.querySelector('h1').innerText") == "The coverage of your file"
    assert browser.run("document.documentElement.scrollWidth") == 390
    assert browser.violations(AXE.read_text()) == []


@pytest.mark.root
@pytest.mark.client
def test_policy_lets_no_script_run(server: Server, browser: Browser) -> None:
    browser.show(f"{server.url}/id/{HOSTILE.hex()}", width=1440, dark=False)
    script = """
        new Promise(done => {
            document.addEventListener('securitypolicyviolation', event => done(event.blockedURI));
            const made = document.createElement('script');
            made.textContent = 'document.title = "pwned"';
            document.body.append(made);
            setTimeout(() => done('ran'), 5000);
        })"""
    assert browser.run(script) == "inline"
    assert browser.run("document.title") != "pwned"
    browser.complaints.clear()
