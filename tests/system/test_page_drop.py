# SPDX-License-Identifier: Apache-2.0
"""Uploads to the page: what is told of a profile, a core file and a binary, and what is not."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from buildidfs.formats.perf import headers
from buildidfs.serve.page.upload import MOST_BYTES
from buildidfs.store import Store
from tests.support.clients.tools import run
from tests.support.elf.corewriter import Mapped, core_file
from tests.support.elf.elfwriter import TEXT, elf_file
from tests.support.elf.perfwriter import PerfWriter
from tests.support.harness.mounts import BuildIdFs
from tests.support.harness.waiting import until
from tests.support.servers import pagestore
from tests.support.servers.openapi import faults
from tests.support.servers.pagestore import COMPLETE, PRIVATE, SECRET, STRIPPED
from tests.support.servers.serving import Reply, Server, serving

pytestmark = pytest.mark.root

BOUNDARY = "----test-boundary"


@pytest.fixture(scope="module")
def server(scratch: Path) -> Iterator[Server]:
    home = scratch / "drop"
    home.mkdir()
    buildidfs = BuildIdFs(home)
    pagestore.make(buildidfs.store)
    with serving(buildidfs.store, "--drop", config="[serve]\nrate = 0\n") as server:
        yield server


def profile(*files: tuple[bytes, bytes, int]) -> bytes:
    """A profile in which a process maps files, each with a build ID and so many samples."""
    write = PerfWriter()
    records = b""
    for number, (path, build_id, samples) in enumerate(files, 1):
        records += write.mmap2(1, 0x10000 * number, 0x1000, path, build_id=build_id)
        records += write.sample(1, 0x10000 * number, 9) * samples
    return write.file(records)


def post(server: Server, target: str, body: bytes, **headers: str) -> Reply:
    lines = [f"POST {target} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    with contextlib.closing(server.connect()) as client:
        with contextlib.suppress(ConnectionError):
            client.send("\r\n".join([*lines, "", ""]).encode() + body)
        return client.reply()


def measured(server: Server, content: bytes) -> Any:
    reply = post(server, "/api/drop", content)
    assert reply.status == 200, reply.body
    return json.loads(reply.body)


def form(content: bytes, name: str = "file") -> bytes:
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"; filename="x"\r\n\r\n'
    other = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="other"\r\n\r\nvalue\r\n'
    return other.encode() + head.encode() + content + f"\r\n--{BOUNDARY}--\r\n".encode()


def test_profile_is_measured(server: Server) -> None:
    told = measured(
        server, profile((b"/usr/bin/complete", COMPLETE, 6), (b"/app/server", STRIPPED, 3))
    )
    assert (told["unit"], told["weight"]) == ("samples", 9)
    assert told["executable"] == 1
    assert told["symbols"] == told["debuginfo"] == round(6 / 9, 6)
    worst = told["files"][0]
    assert (worst["path"], worst["build_id"]) == ("/app/server", STRIPPED.hex())
    assert worst["why"].startswith("stripped")
    assert "install the debug package" in worst["remedy"]


def test_profile_without_build_ids_is_resolved_as_the_commands_do(server: Server) -> None:
    """A path with one file on the host of the profile identifies it, if every user may know it."""
    write = PerfWriter()
    records = b""
    for number, path in enumerate((b"/usr/bin/complete", SECRET), 1):
        records += write.mmap2(1, 0x10000 * number, 0x1000, path)
        records += write.sample(1, 0x10000 * number, 9)
    for host, share in ((b"node-1", 0.5), (b"node-2", 0.0), (b"", 0.0)):
        told = measured(server, write.file(records, {headers.HOSTNAME: write.text(host)}))
        assert told["symbols"] == share
        assert {each["build_id"] for each in told["files"]} <= {"", COMPLETE.hex()}


def test_answer_is_what_its_description_says(server: Server) -> None:
    described = json.loads(server.ask("/api/openapi.json").body)
    answer = described["paths"]["/api/drop"]["post"]["responses"]["200"]
    schema = answer["content"]["application/json"]["schema"]
    told = measured(server, profile((b"/app/server", STRIPPED, 3)))
    assert faults(told, schema, described["components"]["schemas"]) == []


def test_core_file_is_measured(server: Server) -> None:
    content = elf_file([TEXT], build_id=COMPLETE)
    told = measured(server, core_file([Mapped(0x10000, content[:4096], b"/usr/bin/complete")]))
    assert told["unit"] == "binaries"
    assert COMPLETE.hex() in [each["build_id"] for each in told["files"]]


def test_binary_is_measured(server: Server) -> None:
    told = measured(server, elf_file([TEXT], build_id=STRIPPED))
    assert [each["build_id"] for each in told["files"]] == [STRIPPED.hex()]
    assert (told["executable"], told["symbols"]) == (1, 0)


def test_nothing_is_told_of_a_private_file(server: Server) -> None:
    unknown = bytes([0xCF]) * 20
    told = [measured(server, profile((SECRET, each, 3))) for each in (PRIVATE, unknown)]
    assert [each["executable"] for each in told] == [0, 0]
    one, other = (each["files"][0] for each in told)
    assert one["why"] == other["why"]
    # The journal knows what was at the path, and must not be asked.
    nameless = measured(server, profile((SECRET, b"", 3)))["files"][0]
    assert nameless["build_id"] == ""


def test_form_leads_to_a_page(server: Server) -> None:
    page = server.ask("/drop", Accept="text/html")
    assert b'enctype="multipart/form-data"' in page.body
    assert b'action="/drop"' in server.ask("/", Accept="text/html").body
    kind = f"multipart/form-data; boundary={BOUNDARY}"
    body = form(profile((b"/app/<b>x</b>", STRIPPED, 3)))
    reply = post(server, "/drop", body, Content_Type=kind, Sec_Fetch_Site="same-origin")
    assert reply.status == 200
    assert b"/app/&lt;b&gt;x&lt;/b&gt;" in reply.body
    assert b"The coverage of your file" in reply.body


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a profile",
        b"PERFILE2" + b"\xff" * 200,
        b"\x7fELF" + b"\xff" * 200,
        profile((b"/app", STRIPPED, 3))[:150],
        os.urandom(4096),
    ],
    ids=["empty", "text", "perf", "elf", "cut", "noise"],
)
def test_what_cannot_be_read_is_refused(server: Server, content: bytes) -> None:
    reply = post(server, "/api/drop", content)
    assert reply.status == 400
    error = json.loads(reply.body)["error"]
    assert error
    assert "/proc/" not in error


def test_upload_is_told_of_without_a_path_of_the_server(server: Server) -> None:
    told = measured(server, profile((b"/app", STRIPPED, 3))[:-8])
    assert told["incomplete"].startswith("the file is not whole")
    packed = json.loads(post(server, "/api/drop", gzip.compress(b"x")).body)["error"]
    assert "unpack" in packed


def test_upload_that_names_nothing_has_no_coverage(server: Server) -> None:
    told = measured(server, core_file([]))
    assert told["weight"] == 0
    page = post(server, "/drop", core_file([])).body
    assert b"No binaries can be read in it" in page
    assert b"100 %" not in page


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("multipart/form-data", form(b"x")),
        (f"multipart/form-data; boundary={BOUNDARY}", b"no part"),
        (f"multipart/form-data; boundary={BOUNDARY}", form(b"x", "another")),
        (f"multipart/form-data; boundary={'x' * 500}", form(b"x")),
    ],
)
def test_broken_form_is_refused(server: Server, kind: str, body: bytes) -> None:
    assert post(server, "/drop", body, Content_Type=kind).status == 400


def test_form_of_another_site_is_refused(server: Server) -> None:
    reply = post(server, "/drop", b"x", Sec_Fetch_Site="cross-site")
    assert reply.status == 400
    assert b"a form of another site cannot upload" in reply.body.lower()


def test_upload_has_a_bound(server: Server) -> None:
    lines = (
        f"POST /api/drop HTTP/1.1\r\nHost: localhost\r\nContent-Length: {MOST_BYTES + 1}\r\n\r\n"
    )
    with contextlib.closing(server.connect()) as client:
        client.send(lines.encode())
        assert client.reply().status == 413
    big = profile((b"/app", STRIPPED, 1)) + bytes(8 << 20)
    assert post(server, "/api/drop", big).status in (200, 400)


def test_other_pages_take_no_body(server: Server) -> None:
    assert post(server, "/search", b"x").status == 413
    with contextlib.closing(server.connect()) as client:
        assert client.ask("/search", "POST").status == 405


def test_without_the_option_there_is_no_form(scratch: Path, server: Server) -> None:
    store = scratch / "drop/store"
    with serving(store) as plain:
        assert plain.ask("/drop", Accept="text/html").status == 404
        assert post(plain, "/drop", b"x").status == 413
        assert b'action="/drop"' not in plain.ask("/", Accept="text/html").body
    with serving(store, config="[serve]\ndrop = true\n") as configured:
        assert configured.ask("/drop").status == 200


def test_client_that_goes_away_leaves_no_process(server: Server) -> None:
    with contextlib.closing(server.connect()) as client:
        body = profile((b"/app", STRIPPED, 3))
        client.send(
            b"POST /api/drop HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
            + body
        )
        client.socket.shutdown(socket.SHUT_RDWR)
    binary = elf_file([TEXT], build_id=STRIPPED)
    until(lambda: post(server, "/api/drop", binary).status == 200, "the end of the first upload")
    children = [
        pid
        for worker in server.workers()
        for pid in Path(f"/proc/{worker}/task/{worker}/children").read_text().split()
    ]
    assert children == []
    with Store.open(server_store(server), read_only=True) as store:
        assert list(store.check()) == []


def test_process_that_reads_an_upload_has_no_keys(server: Server) -> None:
    program = """
import sys
from buildidfs.serve.page import upload
from buildidfs.store import Store
sys.addaudithook(lambda event, words: event == "subprocess.Popen" and print(words[3]))
with Store.open(sys.argv[1], read_only=True) as store:
    upload.measure(store, b"\\x7fELF")
"""
    keys = {"AWS_SECRET_ACCESS_KEY": "s3cret", "TMPDIR": "/var/tmp"}
    done = run([sys.executable, "-c", program, server_store(server)], env=keys)
    assert done.out == "{}\n", done


@pytest.mark.root
def test_process_that_reads_an_upload_has_no_rights(tmp_path: Path) -> None:
    program = """
import os, socket, sys
from buildidfs.serve.page import upload

ATTEMPTS = {
    "open": lambda: os.open("/etc/passwd", os.O_RDONLY),
    "store": lambda: os.open(sys.argv[1] + "/../secret", os.O_RDONLY),
    "write": lambda: os.open(sys.argv[1] + "/file", os.O_WRONLY | os.O_CREAT),
    "socket": socket.socket,
    "fork": os.fork,
    "kill": lambda: os.kill(os.getppid(), 0),
    "setuid": lambda: os.setuid(0),
}

def probe(empty, path):
    can = []
    for name, attempt in ATTEMPTS.items():
        try:
            attempt()
            can.append(name)
        except OSError:
            pass
    return upload.UploadedFiles(error=repr([can, 0 in os.getresuid() + os.getresgid()]))

upload._reading = probe
upload.main(["0", str(os.getppid()), sys.argv[1]])
"""
    (tmp_path / "secret").write_text("x")
    (tmp_path / "secret").chmod(0o644)
    (tmp_path / "empty").mkdir()
    done = run([sys.executable, "-c", program, tmp_path / "empty"])
    assert json.loads(done.out)["error"] == "[[], False]", done


def server_store(server: Server) -> str:
    argv = Path(f"/proc/{server.process.pid}/cmdline").read_bytes().split(b"\0")
    return os.fsdecode(argv[argv.index(b"--store") + 1])
