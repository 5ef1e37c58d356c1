# SPDX-License-Identifier: Apache-2.0
"""buildidfs serve: the debuginfod protocol over real sockets, from files made to order."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path

import pytest

from buildidfs import __version__
from buildidfs.store import Store
from tests.support.clients.tools import run, tool
from tests.support.containers import packages
from tests.support.elf.elfwriter import DWARF, TEXT, Section, elf_file, gdb_scripts
from tests.support.harness.mounts import BuildIdFs
from tests.support.servers.serving import Server, serving

pytestmark = pytest.mark.root

SMALL, BIG, PACKED, PRIVATE, HOSTILE, SQUEEZED, UNKNOWN = (
    bytes([n]) * 20 for n in range(0xA1, 0xA8)
)
SCRIPT = "import os; os.system('touch /tmp/pwned')"
PAD = random.Random(1).randbytes(9 << 20)
TEXTS = b"the same line again and again\n" * 40_000


@dataclasses.dataclass(frozen=True)
class Site:
    """A server, and the files that it has by the hex of their build IDs."""

    server: Server
    directory: Path
    files: dict[str, bytes]
    buildidfs: BuildIdFs


def _files() -> dict[bytes, bytes]:
    pad, lines, script = Section(b".pad", PAD), Section(b".lines", TEXTS), gdb_scripts(SCRIPT)
    sections = {
        PACKED: [TEXT, lines],
        SQUEEZED: [TEXT, script, lines],
        SMALL: [TEXT, DWARF],
        BIG: [TEXT, DWARF, pad],
        PRIVATE: [TEXT, DWARF],
        HOSTILE: [TEXT, script, pad],
    }
    return {build_id: elf_file(each, build_id=build_id) for build_id, each in sections.items()}


def name_of(build_id: bytes) -> str:
    return f"app-{build_id[:1].hex()}"


@pytest.fixture(scope="module")
def site(scratch: Path) -> Iterator[Site]:
    home = scratch / "serve"
    tree = home / "tree/bin"
    tree.mkdir(parents=True)
    files = _files()
    buildidfs = BuildIdFs(home)
    for build_id, content in files.items():
        path = tree / name_of(build_id)
        path.write_bytes(content)
        path.chmod(0o600 if build_id == PRIVATE else 0o755)
        if build_id in (HOSTILE, SQUEEZED):
            os.chown(path, 65534, 65534)
        os.utime(path, (1_600_000_000, 1_600_000_000))
        if build_id == SQUEEZED:
            buildidfs("scan", "tree", tree)
            with Store.open(buildidfs.store) as store:
                assert len(list(store.compress(int(time.time()) + 10))) == 2
    buildidfs("scan", "tree", tree)
    with serving(buildidfs.store, "--cors", config="[serve]\nrate = 0\n") as server:
        named = {build_id.hex(): content for build_id, content in files.items()}
        yield Site(server, tree, named, buildidfs)


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build_id", "what"),
    [(SMALL, "executable"), (SMALL, "debuginfo"), (BIG, "debuginfo"), (PACKED, "executable")],
    ids=["small", "small-debuginfo", "big", "packed"],
)
def test_file_is_served_as_it_was_captured(site: Site, build_id: bytes, what: str) -> None:
    reply = site.server.ask(f"/buildid/{build_id.hex()}/{what}")
    assert reply.status == 200
    assert reply.body == site.files[build_id.hex()]
    assert reply.headers["x-debuginfod-size"] == str(len(reply.body))
    assert reply.headers["x-debuginfod-file"] == f"{site.directory}/{name_of(build_id)}"
    assert reply.headers["content-type"] == "application/octet-stream"
    assert reply.headers["cache-control"] == "public"


def test_date_of_the_file_is_told(site: Site) -> None:
    reply = site.server.ask(f"/buildid/{PACKED.hex()}/executable", "HEAD")
    assert parsedate_to_datetime(reply.headers["last-modified"]).timestamp() == 1_600_000_000


def test_head_is_the_answer_without_the_body(site: Site) -> None:
    target = f"/buildid/{BIG.hex()}/debuginfo"
    with contextlib.closing(site.server.connect()) as client:
        head = client.ask(target, "HEAD")
        whole = client.ask(target)
    assert head.body == b""
    assert whole.body == site.files[BIG.hex()]
    assert {**head.headers, "date": ""} == {**whole.headers, "date": ""}


def test_upper_case_and_second_slash_lead_to_the_same_file(site: Site) -> None:
    reply = site.server.ask(f"//buildid/{SMALL.hex().upper()}/executable")
    assert reply.body == site.files[SMALL.hex()]
    absolute = site.server.ask(f"http://elsewhere/buildid/{SMALL.hex()}/executable")
    assert absolute.body == site.files[SMALL.hex()]
    encoded = site.server.ask(f"/%62uildid/{SMALL.hex()}/%65xecutable")
    assert encoded.body == site.files[SMALL.hex()]


@pytest.mark.parametrize(
    "target",
    [
        f"/buildid/{UNKNOWN.hex()}/executable",
        f"/buildid/{PRIVATE.hex()}/executable",
        f"/buildid/{PRIVATE.hex()}/debuginfo",
        f"/buildid/{PRIVATE.hex()}/section/.debug_info",
        f"/buildid/{PACKED.hex()}/debuginfo",
        f"/buildid/{SMALL.hex()}/variants",
        f"/buildid/{SMALL.hex()}/path",
        f"/buildid/{SMALL.hex()}/executable/more",
        f"/buildid/{SMALL.hex()}/section/.nothing",
        f"/buildid/{SMALL.hex()}/../{SMALL.hex()}/executable",
        f"/buildid/{SMALL.hex()}",
        f"/buildid/{SMALL.hex()[:-2]}/executable",
        f"/buildid/{SMALL.hex()[:-1]}/executable",
        "/buildid/../../etc/passwd",
        "/buildid/%2e%2e/%2e%2e/etc/passwd",
        "/buildid//executable",
        "/buildid/usr/lib",
        "/buildid/by-path/executable",
        "/nothing",
    ],
)
def test_file_that_is_not_there_or_not_for_everybody_is_not_found(site: Site, target: str) -> None:
    reply = site.server.ask(target)
    assert reply.status == 404, reply
    assert b"DWARF" not in reply.body
    assert "x-debuginfod-file" not in reply.headers


def test_file_above_the_size_that_the_client_takes_is_refused(site: Site) -> None:
    size = len(site.files[SMALL.hex()])
    target = f"/buildid/{SMALL.hex()}/executable"
    answers = [site.server.ask(target, X_DEBUGINFOD_MAXSIZE=str(most)) for most in (size - 1, size)]
    assert [answer.status for answer in answers] == [406, 200]
    assert site.server.ask(target, X_DEBUGINFOD_MAXSIZE="many").status == 200


def test_proxies_may_pass_on_a_request_for_a_file_that_is_here(site: Site) -> None:
    hops = ", ".join(["10.0.0.1"] * 9)
    found = site.server.ask(f"/buildid/{SMALL.hex()}/executable", X_Forwarded_For=hops)
    missing = site.server.ask(f"/buildid/{UNKNOWN.hex()}/executable", X_Forwarded_For=hops)
    assert found.status == 200
    assert (missing.status, b"proxies" in missing.body) == (404, True)


def test_file_of_a_package_is_told_with_its_package(buildidfs: BuildIdFs, directory: Path) -> None:
    build_id = bytes([0xD1]) * 20
    root = directory / "root"
    (root / "usr/bin").mkdir(parents=True)
    (root / "usr/bin/packed").write_bytes(elf_file([TEXT], build_id=build_id))
    package = packages.deb(root, directory)
    buildidfs("scan", "package", package)
    with serving(buildidfs.store) as server:
        reply = server.ask(f"/buildid/{build_id.hex()}/executable")
        assert reply.body == (root / "usr/bin/packed").read_bytes()
        assert reply.headers["x-debuginfod-file"] == "/usr/bin/packed"
        assert reply.headers["x-debuginfod-archive"] == str(package)
        found = json.loads(server.ask("/metadata?key=glob&value=/usr/bin/*").body)
    assert found["results"] == [
        {
            "type": "executable",
            "buildid": build_id.hex(),
            "file": "/usr/bin/packed",
            "archive": str(package),
        }
    ]


def test_signature_that_a_package_has_for_a_file_is_sent(
    buildidfs: BuildIdFs, directory: Path
) -> None:
    """It fits the bytes, also after the index was rebuilt and the same file was seen elsewhere."""
    build_id = bytes([0xD2]) * 20
    root, key, public = directory / "root", directory / "key.pem", directory / "public.pem"
    program = root / "usr/bin/signed"
    program.parent.mkdir(parents=True)
    program.write_bytes(elf_file([TEXT], build_id=build_id))
    program.chmod(0o755)
    openssl = tool("openssl")
    run([openssl, "genrsa", "-out", key, "2048"], check=True)
    run([openssl, "rsa", "-in", key, "-pubout", "-out", public], check=True)
    made = directory / "made"
    run([openssl, "dgst", "-sha256", "-sign", key, "-out", made, program], check=True)
    # EVM_IMA_XATTR_DIGSIG, version 2, SHA-256, ID of the key, length
    signature = bytes([3, 2, 4]) + b"key\0" + (256).to_bytes(2, "big") + made.read_bytes()
    package = packages.rpm(root, directory)
    listed = [path.relative_to(root) for path in sorted(root.rglob("*"))]
    packages.with_file_signatures(
        package, [signature if root / path == program else b"" for path in listed]
    )
    buildidfs("scan", "package", package)
    shutil.rmtree(buildidfs.store / "index")
    buildidfs("check", "--repair", check=False)
    buildidfs("scan", "tree", program)
    assert buildidfs("check").rc == 0
    with serving(buildidfs.store) as server:
        reply = server.ask(f"/buildid/{build_id.hex()}/executable")
    assert reply.headers["x-debuginfod-file"] == str(program)
    assert reply.headers["x-debuginfod-imasignature"] == signature.hex()
    (directory / "served").write_bytes(reply.body)
    argv = [openssl, "dgst", "-sha256", "-verify", public, "-signature", made]
    assert run([*argv, directory / "served"]).out == "Verified OK\n"


# --- sections -------------------------------------------------------------------------------------


def test_section_is_its_bytes_in_the_file(site: Site) -> None:
    for build_id, name, content in (
        (SMALL, ".debug_info", DWARF.data),
        (BIG, ".pad", PAD),
        (PACKED, ".lines", TEXTS),
        (PACKED, ".text", TEXT.data),
    ):
        reply = site.server.ask(f"/buildid/{build_id.hex()}/section/{name}")
        assert (reply.status, reply.body) == (200, content)
        assert reply.headers["x-debuginfod-size"] == str(len(content))


def test_range_of_a_section(site: Site) -> None:
    target = f"/buildid/{BIG.hex()}/section/.pad"
    reply = site.server.ask(target, Range="bytes=1000000-1999999")
    assert (reply.status, reply.body) == (206, PAD[1_000_000:2_000_000])


# --- ranges, conditions, codings ------------------------------------------------------------------


@pytest.mark.parametrize("build_id", [SMALL, BIG, PACKED], ids=["small", "big", "packed"])
def test_ranges(site: Site, build_id: bytes) -> None:
    content = site.files[build_id.hex()]
    size = len(content)
    target = f"/buildid/{build_id.hex()}/executable"
    with contextlib.closing(site.server.connect()) as client:
        for text, first, last in (
            ("0-0", 0, 0),
            ("1-", 1, size - 1),
            ("-7", size - 7, size - 1),
            (f"{size - 1}-{size * 2}", size - 1, size - 1),
            (f"-{size * 2}", 0, size - 1),
            (f"{size // 2}-{size // 2 + 99}", size // 2, size // 2 + 99),
        ):
            reply = client.ask(target, Range=f"bytes={text}")
            assert reply.status == 206, text
            assert reply.headers["content-range"] == f"bytes {first}-{last}/{size}"
            assert reply.body == content[first : last + 1], text
        for text in (f"{size}-", "-0", f"{size}-{size + 1}", f"{10**18}-"):
            reply = client.ask(target, Range=f"bytes={text}")
            assert (reply.status, reply.headers["content-range"]) == (416, f"bytes */{size}")
        many = ",".join(f"{n}-{n}" for n in range(500))
        for text in (f"bytes={many}", "lines=1-2", "bytes=2-1", "bytes=-", "bytes=x-y", "bytes"):
            reply = client.ask(target, Range=text)
            assert (reply.status, reply.body) == (200, content), text


def test_tag_of_a_file_spares_its_transfer(site: Site) -> None:
    target = f"/buildid/{SMALL.hex()}/executable"
    with contextlib.closing(site.server.connect()) as client:
        first = client.ask(target)
        tag = first.headers["etag"]
        assert tag == f'"{hashlib.sha256(first.body).hexdigest()}"'
        for known in (tag, f'"x", {tag}', f"W/{tag}", "*"):
            reply = client.ask(target, If_None_Match=known)
            assert (reply.status, reply.body) == (304, b"")
            assert reply.headers["etag"] == tag
        assert client.ask(target, If_None_Match='"other"').body == first.body
        assert client.ask(target, Range="bytes=0-3", If_Range=tag).status == 206
        assert client.ask(target, Range="bytes=0-3", If_Range='"other"').body == first.body


def test_compressed_blob_is_sent_as_it_is_stored_to_clients_that_take_zstd(site: Site) -> None:
    import zstandard

    content = site.files[PACKED.hex()]
    target = f"/buildid/{PACKED.hex()}/executable"
    reply = site.server.ask(target, Accept_Encoding="gzip, zstd;q=0.5")
    assert reply.headers["content-encoding"] == "zstd"
    assert len(reply.body) < len(content) // 10
    assert reply.headers["x-debuginfod-size"] == str(len(content))
    with zstandard.ZstdDecompressor().stream_reader(reply.body, read_across_frames=True) as reader:
        assert reader.read() == content
    for coding in ("gzip", "zstd;q=0", "identity", "*;q=0"):
        plain = site.server.ask(target, Accept_Encoding=coding)
        assert plain.body == content, coding
        assert plain.headers["vary"] == "Accept-Encoding"
        assert plain.headers["etag"] != reply.headers["etag"]
    part = site.server.ask(target, Accept_Encoding="zstd", Range="bytes=5-8")
    assert (part.status, part.body) == (206, content[5:9])


# --- scripts of strangers -------------------------------------------------------------------------


@pytest.mark.parametrize("build_id", [HOSTILE, SQUEEZED], ids=["plain", "packed"])
def test_scripts_of_a_stranger_are_zeros_through_every_door(site: Site, build_id: bytes) -> None:
    content = site.files[build_id.hex()]
    section = gdb_scripts(SCRIPT).data
    at = content.index(section)
    blank = content[:at] + bytes(len(section)) + content[at + len(section) :]
    target = f"/buildid/{build_id.hex()}/executable"
    with contextlib.closing(site.server.connect()) as client:
        assert client.ask(target).body == blank
        assert client.ask(target, Accept_Encoding="zstd").body == blank
        part = client.ask(target, Range=f"bytes={at + 2}-{at + len(section) + 5}")
        assert part.body == blank[at + 2 : at + len(section) + 6]
        section_target = f"/buildid/{build_id.hex()}/section/.debug_gdb_scripts"
        assert client.ask(section_target).body == bytes(len(section))
        assert client.ask(section_target, Range="bytes=3-9").body == bytes(7)


# --- other pages ----------------------------------------------------------------------------------


def test_metadata_of_paths(site: Site) -> None:
    names = [name_of(each) for each in (SMALL, BIG, PACKED, HOSTILE, SQUEEZED)]

    def found(key: str, value: object) -> list[dict[str, str]]:
        reply = site.server.ask(f"/metadata?key={key}&value={value}")
        assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
        answer = json.loads(reply.body)
        assert answer["complete"] is True
        return list(answer["results"])

    directory = site.directory
    for pattern in (f"{directory}/app-*", f"{directory.parent}/*/*", f"{directory}/app-a[0-9]",
                    f"{directory}/app-[^b]?"):  # fmt: skip
        paths = {row["file"] for row in found("glob", pattern)}
        assert paths == {f"{directory}/{name}" for name in names}, pattern
    exact = found("file", f"{directory}/{names[0]}")
    assert exact == [
        {"type": what, "buildid": SMALL.hex(), "file": f"{directory}/{names[0]}"}
        for what in ("executable", "debuginfo")
    ]
    assert found("buildid", SMALL.hex()) == exact
    assert found("buildid", PRIVATE.hex()) == []
    assert found("file", f"{directory}/{name_of(PRIVATE)}") == []
    assert found("glob", "/nothing/*") == []
    for query in ("", "?key=glob", "?key=other&value=x", "?value=%zz&key=file"):
        assert site.server.ask(f"/metadata{query}").status == 400, query


def test_root_health_and_metrics(site: Site) -> None:
    assert site.server.ask("/").body == f"buildidfs {__version__}\n".encode()
    assert site.server.ask("/healthz").body == b"ok\n"
    target = f"/buildid/{UNKNOWN.hex()}/debuginfo"

    def count() -> int:
        name = 'http_responses_transfer_bytes_count{code="404",type="debuginfo"} '
        body = site.server.ask("/metrics").body.decode()
        lines = body.splitlines()
        assert "ready 1" in lines
        assert "buildidfs_store_build_ids 6.0" in lines
        subprocess.run([tool("promtool"), "check", "metrics"], input=body, text=True, check=True)
        return next((int(line[len(name) :]) for line in lines if line.startswith(name)), 0)

    before = count()
    for _ in range(3):
        site.server.ask(target)
    assert count() == before + 3
    for invented in (f"/buildid/{SMALL.hex()}/invented", "/invented"):
        assert site.server.ask(invented).status == 404
    assert b"invented" not in site.server.ask("/metrics").body


def test_methods(site: Site) -> None:
    target = f"/buildid/{SMALL.hex()}/executable"
    reply = site.server.ask(target, "OPTIONS", Origin="https://profiler.firefox.com")
    assert reply.status == 204
    assert reply.headers["access-control-allow-origin"] == "*"
    assert "GET" in reply.headers["access-control-allow-methods"]
    assert "cache-control" in reply.headers["access-control-allow-headers"]
    assert site.server.ask(target).headers["access-control-allow-origin"] == "*"
    for method in ("POST", "PUT", "DELETE", "PATCH", "TRACE"):
        reply = site.server.ask(target, method)
        assert (reply.status, "GET" in reply.headers["allow"]) == (405, True), method


def test_requests_that_are_sent_at_once_are_answered_in_order(site: Site) -> None:
    ids = [SMALL, BIG, UNKNOWN, PACKED, SMALL]
    with contextlib.closing(site.server.connect()) as client:
        client.send(
            b"".join(
                b"GET /buildid/%s/executable HTTP/1.1\r\nHost: localhost\r\n\r\n" % x.hex().encode()
                for x in ids
            )
        )
        replies = [client.reply() for _ in ids]
    bodies = [site.files.get(build_id.hex(), b"not found\n") for build_id in ids]
    assert [reply.body for reply in replies] == bodies


def test_old_client_gets_one_answer(site: Site) -> None:
    with contextlib.closing(site.server.connect()) as client:
        client.send(b"GET /buildid/%s/executable HTTP/1.0\r\n\r\n" % SMALL.hex().encode())
        assert client.rest().endswith(site.files[SMALL.hex()])


def test_client_that_has_ended_its_side_gets_its_answer(site: Site) -> None:
    with contextlib.closing(site.server.connect()) as client:
        client.send(
            b"GET /buildid/%s/executable HTTP/1.1\r\nHost: localhost\r\n\r\n" % BIG.hex().encode()
        )
        client.socket.shutdown(socket.SHUT_WR)
        assert client.rest().endswith(site.files[BIG.hex()])
