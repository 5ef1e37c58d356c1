# SPDX-License-Identifier: Apache-2.0
"""The symbol server: what the Firefox Profiler and samply ask for, and what nobody should."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import select
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from buildidfs.serve import messages
from tests.support.clients.tools import nm, run, tool
from tests.support.elf.programs import build_id_of
from tests.support.harness.mounts import BuildIdFs
from tests.support.harness.waiting import until
from tests.support.servers.serving import Client, Server, serving

pytestmark = [pytest.mark.root, pytest.mark.client]

SYMBOLICATE, SOURCE, ASM = "/symbolicate/v5", "/source/v1", "/asm/v1"
HEAD = "POST %s HTTP/1.1\r\nHost: localhost\r\n"
NO_RATE = "[serve]\nrate = 0\n"
CODE = """\
static volatile int sink;
static inline __attribute__((always_inline)) int square(int x)
{
    sink = x; /* in square */
    return x * x;
}
__attribute__((noinline)) int middle(int a)
{
    return square(a) + 1;
}
int main(int argc, char **argv)
{
    sink += middle(argc);
    return argv != 0;
}
"""


def debug_id(build_id: str) -> str:
    """The ID that Breakpad, samply and Firefox make of a build ID."""
    guid = bytes.fromhex(build_id)[:16].ljust(16, b"\0")
    return (guid[3::-1] + guid[5:3:-1] + guid[7:5:-1] + guid[8:]).hex().upper() + "0"


@dataclasses.dataclass(frozen=True)
class Program:
    """A program as it was compiled, with its symbols."""

    path: Path
    source: Path
    build_id: str
    symbols: dict[str, tuple[int, int]]

    @property
    def module(self) -> list[str]:
        """Name and debug ID, as requests have them."""
        return [self.path.name, debug_id(self.build_id)]

    @property
    def key(self) -> str:
        """The key of the module in answers."""
        return "/".join(self.module)

    def start(self, name: str) -> int:
        """The address of a function, from the first segment."""
        return self.symbols[name][0]


def compiled(home: Path, name: str, *options: str, base: int = 0) -> Program:
    """Compile `CODE` with a build ID that nothing else has."""
    source = home / f"{name}.c"
    source.write_text(f'{CODE}const char unique[] = "{name} {home}";\n')
    path = home / "bin" / name
    path.parent.mkdir(exist_ok=True)
    argv = [tool("gcc"), "-g", "-O1", "-Wl,--build-id", *options, "-o", path, source]
    run(argv, check=True)
    path.chmod(0o755)
    symbols = {}
    for line in nm("-S", path).splitlines():
        words = line.split()
        if len(words) == 4:
            symbols[words[3]] = int(words[0], 16) - base, int(words[1], 16)
    return Program(path, source, build_id_of(path), symbols)


@dataclasses.dataclass(frozen=True)
class Site:
    """A server and what it has."""

    server: Server
    plain: Program
    fixed: Program
    private: Program
    half: Program
    buildidfs: BuildIdFs

    def names(self, program: Program, *offsets: int) -> Any:
        """The frames at offsets of a program, asked for as the Firefox Profiler does."""
        stacks = [[[0, offset] for offset in offsets]]
        reply = self.server.post(
            SYMBOLICATE, {"jobs": [{"memoryMap": [program.module], "stacks": stacks}]}
        )
        assert reply.status == 200, reply
        assert reply.headers["content-type"] == "application/json"
        return json.loads(reply.body)["results"][0]


@pytest.fixture(scope="module")
def site(scratch: Path) -> Iterator[Site]:
    home = scratch / "symbols"
    home.mkdir()
    plain = compiled(home, "plain")
    fixed = compiled(home, "fixed", "-no-pie", base=0x400000)
    private = compiled(home, "private")
    private.path.chmod(0o700)
    half = compiled(home, "half")
    debug = home / "bin/half.debug"
    run([tool("objcopy"), "--only-keep-debug", half.path, debug], check=True)
    debug.chmod(0o600)
    run([tool("strip"), "--strip-debug", half.path], check=True)
    buildidfs = BuildIdFs(home)
    buildidfs("scan", "tree", "--sources", "--source-dir", home, home / "bin")
    for name in ("plain", "fixed", "private", "half"):
        (home / f"{name}.c").unlink()
    with serving(buildidfs.store, "--cors", config=NO_RATE) as server:
        yield Site(server, plain, fixed, private, half, buildidfs)


# --- names ----------------------------------------------------------------------------------------


def test_functions_lines_and_inlined_calls_are_named(site: Site) -> None:
    start, size = site.plain.symbols["middle"]
    result = site.names(site.plain, start, start + 1, site.plain.start("main"))
    first, second, main = result["stacks"][0]
    assert first == {
        "frame": 0,
        "module": "plain",
        "module_offset": hex(start),
        "function": "middle",
        "function_offset": "0x0",
        "function_size": hex(size),
        "file": str(site.plain.source),
        "line": first["line"],
        "inlines": [{"function": "square", "file": str(site.plain.source), "line": 4}],
    }
    assert first["line"] in (8, 9)
    assert (second["function"], second["function_offset"]) == ("middle", "0x1")
    assert (main["frame"], main["function"]) == (2, "main")
    assert result["found_modules"] == {site.plain.key: True}


def test_addresses_count_from_the_first_segment(site: Site) -> None:
    assert site.names(site.fixed, site.fixed.start("main"))["stacks"][0][0]["function"] == "main"


def test_request_of_samply_without_jobs_and_one_with_many(site: Site) -> None:
    job = {"memoryMap": [site.plain.module], "stacks": [[[0, site.plain.start("main")]]]}
    one = json.loads(site.server.post(SYMBOLICATE, job).body)["results"]
    many = json.loads(site.server.post(SYMBOLICATE, {"jobs": [job] * 10, "version": 5}).body)
    assert len(one) == 1
    assert many["results"] == one * 10


def test_frames_without_a_name_are_answered_all_the_same(site: Site) -> None:
    unknown = ["gone.so", debug_id("ab" * 20)]
    modules = [site.plain.module, unknown, site.fixed.module, ["", ""], ["a.pdb", "x" * 33]]
    stacks = [[[0, 3], [1, 16], [-1, 17], [0, 1 << 63], [3, 5], [4, 5]], []]
    body = {"jobs": [{"memoryMap": modules, "stacks": stacks}]}
    result = json.loads(site.server.post(SYMBOLICATE, body).body)["results"][0]
    assert [set(frame) for frame in result["stacks"][0]] == [
        {"frame", "module", "module_offset"}
    ] * 6
    assert [frame["module_offset"] for frame in result["stacks"][0][:3]] == ["0x3", "0x10", "0x11"]
    assert result["stacks"][1] == []
    assert result["found_modules"] == {
        site.plain.key: True,
        "/".join(unknown): False,
        site.fixed.key: None,
        "/": False,
        "a.pdb/" + "x" * 33: False,
    }
    assert "this server has no file" in result["module_errors"]["/".join(unknown)][0]["message"]


@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "split"])
def test_a_program_without_a_build_id_is_found_by_the_hash_of_its_code(
    site: Site, directory: Path, is_split: bool
) -> None:
    """The debug ID is what symbolic 13.9 makes of such a file, too."""
    path, source, text = (directory / name for name in ("nameless", "nameless.c", "text"))
    source.write_text(f'{CODE}const char unique[] = "{directory}";\n')
    run([tool("gcc"), "-g", "-O1", "-Wl,--build-id=none", "-o", path, source], check=True)
    run([tool("objcopy"), "-O", "binary", "-j", ".text", path, text], check=True)
    found = bytearray(16)
    for at, byte in enumerate(text.read_bytes()[:4096]):
        found[at % 16] ^= byte
    (main,) = [line for line in nm(path).splitlines() if line.endswith(" main")]
    offset = int(main.split()[0], 16)
    if is_split:
        debug = directory / "nameless.debug"
        run([tool("objcopy"), "--only-keep-debug", path, debug], check=True)
        run([tool("objcopy"), "-S", f"--add-gnu-debuglink={debug}", path], check=True)
    site.buildidfs("add", path)
    job = {"memoryMap": [["nameless", debug_id(found.hex())]], "stacks": [[[0, offset]]]}
    result = json.loads(site.server.post(SYMBOLICATE, job).body)["results"][0]
    assert result["stacks"][0][0]["function"] == "main", result
    # Both programs have the same code; either may name it.
    assert Path(result["stacks"][0][0]["file"]).name == source.name


def test_later_capture_is_named_at_once(site: Site, directory: Path) -> None:
    late = compiled(directory, "late")
    run([tool("objcopy"), "--only-keep-debug", late.path, directory / "late.debug"], check=True)
    run([tool("strip"), late.path], check=True)
    assert site.names(late, late.start("main"))["found_modules"] == {late.key: False}
    site.buildidfs("scan", "tree", late.path)
    (nameless,) = site.names(late, late.start("main"))["stacks"][0]
    assert "function" not in nameless
    site.buildidfs("add", directory / "late.debug")
    (named,) = site.names(late, late.start("main"))["stacks"][0]
    assert named["function"] == "main"
    site.buildidfs("remove", late.build_id)
    assert site.names(late, late.start("main"))["found_modules"] == {late.key: False}


# --- what not everybody may read ------------------------------------------------------------------


def test_private_file_is_as_one_that_is_not_here(site: Site) -> None:
    other = dataclasses.replace(site.private, build_id="cd" * 20)
    said = []
    for program in (site.private, other):
        start = hex(program.start("main"))
        of_id = {"debugName": "x", "debugId": program.module[1]}
        file = str(program.source)
        bodies = {
            SOURCE: [{**of_id, "moduleOffset": start, "file": file}],
            ASM: [
                {**of_id, "startAddress": start, "size": "0x10"},
                {"codeId": program.build_id, "startAddress": start, "size": "0x10"},
            ],
            SYMBOLICATE: [{"memoryMap": [program.module], "stacks": [[[0, int(start, 16)]]]}],
        }
        replies = [site.server.post(path, body) for path in bodies for body in bodies[path]]
        text = b"\n".join(reply.body for reply in replies).decode()
        said.append(text.replace(program.module[1], "ID"))
        assert "main" not in text
        assert "xor" not in text
    assert said[0] == said[1]


def test_private_debuginfo_names_nothing_of_a_public_executable(site: Site) -> None:
    (frame,) = site.names(site.half, site.half.start("middle"))["stacks"][0]
    assert (frame["function"], "file" in frame, "inlines" in frame) == ("middle", False, False)


def test_symbolizer_is_a_user_of_its_own_without_the_store(site: Site) -> None:
    assert site.names(site.plain, site.plain.start("main"))["found_modules"][site.plain.key]
    (worker,) = site.server.workers()
    found = [
        int(child)
        for task in Path(f"/proc/{worker}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
    assert len(found) == 1
    status = Path(f"/proc/{found[0]}/status").read_text()
    assert re.search(r"^CapEff:\t0+$", status, re.MULTILINE)
    assert not re.search(r"^Uid:\t0\t", status, re.MULTILINE)
    opened = {os.readlink(each) for each in Path(f"/proc/{found[0]}/fd").iterdir()}
    assert not any("/blobs/" in path or "/index/" in path for path in opened)


def test_server_without_capabilities_names_functions_too(site: Site) -> None:
    """As in the unit of examples/, where the symbolizer can be no other user."""
    without = [tool("setpriv"), "--bounding-set=-all", "--inh-caps=-all", "--ambient-caps=-all"]
    with serving(site.buildidfs.store, config=NO_RATE, under=without) as server:
        main = dataclasses.replace(site, server=server).names(site.plain, site.plain.start("main"))
        assert main["stacks"][0][0]["function"] == "main"
        assert "runs with user ID 0 still" in server.log()


# --- sources and instructions ---------------------------------------------------------------------


def ask(site: Site, path: str, program: Program, **fields: object) -> Any:
    body = {"debugName": program.path.name, "debugId": program.module[1], **fields}
    reply = site.server.post(path, body)
    assert reply.status == 200, reply
    return json.loads(reply.body)


def test_source_of_a_function_is_sent(site: Site) -> None:
    start = hex(site.plain.start("middle"))
    file = str(site.plain.source)
    assert ask(site, SOURCE, site.plain, moduleOffset=start, file=file) == {
        "symbolsLastModified": None,
        "sourceLastModified": None,
        "file": file,
        "source": f'{CODE}const char unique[] = "plain {site.plain.source.parent}";\n',
    }


@pytest.mark.parametrize("file", ["/etc/passwd", "", "../../etc/passwd", "x" * 5000, "a\0b"])
def test_source_that_no_function_at_the_address_is_in_is_refused(site: Site, file: str) -> None:
    start = hex(site.plain.start("middle"))
    answer = ask(site, SOURCE, site.plain, moduleOffset=start, file=file)
    assert list(answer) == ["error"]
    answer = ask(site, SOURCE, site.plain, moduleOffset="0x3", file=str(site.plain.source))
    assert answer == {"error": "no function at that address is in that file"}


def test_instructions_are_those_of_objdump(site: Site) -> None:
    for program, base in ((site.plain, 0), (site.fixed, 0x400000)):
        start, size = program.symbols["main"]
        answer = ask(site, ASM, program, startAddress=hex(start), size=hex(size))
        told = answer.pop("instructions")
        assert answer == {
            "startAddress": hex(start), "size": hex(size), "arch": "x86_64", "syntax": ["Intel"],
        }  # fmt: skip
        objdump = run(
            [
                tool("objdump"), "-d", "-M", "intel", "--no-show-raw-insn",
                f"--start-address={base + start}", f"--stop-address={base + start + size}",
                program.path,
            ],
            check=True,
        ).out  # fmt: skip
        theirs = re.findall(r"^ +([0-9a-f]+):\t(\S+)", objdump, re.MULTILINE)
        ours = [(f"{base + start + at:x}", text.split()[0]) for at, text in told]
        assert ours == theirs
        (call,) = [text for _, text in told if text.startswith("call")]
        assert call == f"call {base + program.start('middle'):#x} <middle>"


def test_instructions_go_on_to_the_end_of_the_function(site: Site) -> None:
    start, size = site.plain.symbols["main"]
    fields = {"startAddress": hex(start), "size": "0x1"}
    one = ask(site, ASM, site.plain, **fields)
    assert len(one["instructions"]) == 1
    code = {"codeId": site.plain.build_id, "debugId": None}
    whole = ask(site, ASM, site.plain, **fields, **code, continueUntilFunctionEnd=True)
    assert whole["size"] == hex(size)
    assert whole["instructions"][-1][1] == "ret"


@pytest.mark.parametrize("start", ["0x0", "0xffffffffffffffff", "0x100000"])
def test_bytes_that_are_no_code_are_not_sent(site: Site, start: str) -> None:
    answer = ask(site, ASM, site.plain, startAddress=start, size="0x40")
    assert answer == {"error": "no code of the file is at that address"}


# --- web pages ------------------------------------------------------------------------------------


def test_page_of_another_origin_may_ask(site: Site) -> None:
    wish = {"Origin": "https://profiler.firefox.com", "Access_Control_Request_Method": "POST"}
    allowed = site.server.ask(SYMBOLICATE, "OPTIONS", **wish)
    assert allowed.status == 204
    assert "POST" in allowed.headers["access-control-allow-methods"].split(", ")
    assert "content-type" in allowed.headers["access-control-allow-headers"]
    answer = site.server.post(SYMBOLICATE, {"jobs": []}, Content_Type="text/plain;charset=UTF-8")
    assert answer.headers["access-control-allow-origin"] == "*"
    assert answer.body == b'{"results":[]}'


# --- hostile requests -----------------------------------------------------------------------------


def stacks(*stack: object) -> dict[str, object]:
    return {"memoryMap": [["a", "0" * 33]], "stacks": list(stack)}


@pytest.mark.parametrize("path", [SYMBOLICATE, SOURCE, ASM])
@pytest.mark.parametrize(
    "body",
    [
        b"", b"null", b"[]", b"{}", b"\0", b"\xff\xfe", b'{"jobs":1}', b'"' + b"x" * 100_000,
        b"[" * 1_000_000, b'{"jobs":' * 200_000, b'{"x":' + b"[" * 500_000 + b"]" * 500_000 + b"}",
        b"9" * 100_000, b'{"jobs":[{"memoryMap":[["a"]],"stacks":[]}]}',
    ],
    ids=range(13),
)  # fmt: skip
def test_body_that_means_nothing_is_refused(site: Site, path: str, body: bytes) -> None:
    reply = site.server.post(path, body)
    assert reply.status == 400
    assert list(json.loads(reply.body)) == ["error"]
    assert len(reply.body) < 1000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (SYMBOLICATE, stacks([[1, 0]])),
        (SYMBOLICATE, stacks([[-2, 0]])),
        (SYMBOLICATE, stacks([[0, 1 << 64]])),
        (SYMBOLICATE, stacks([[0, -2]])),
        (SYMBOLICATE, stacks([[0, 1.5]])),
        (SYMBOLICATE, stacks([[0, True]])),
        (SYMBOLICATE, stacks([["0", 1]])),
        (SYMBOLICATE, stacks([[0, 1, 2]])),
        (SYMBOLICATE, stacks(*([[[0, 1]] * 1001] * 200))),
        (SYMBOLICATE, {"jobs": [stacks()] * 1000}),
        (SYMBOLICATE, {"memoryMap": [["a", "0"]] * 30_000, "stacks": []}),
        (SOURCE, {"debugId": "0" * 33, "moduleOffset": 5, "file": "x"}),
        (SOURCE, {"debugId": "0" * 33, "moduleOffset": "5", "file": "x"}),
        (SOURCE, {"debugId": ["0"], "moduleOffset": "0x5", "file": "x"}),
        (ASM, {"debugId": "0" * 33, "startAddress": "0x1", "size": "-0x1"}),
        (ASM, {"debugId": "0" * 33, "startAddress": "0x" + "f" * 17, "size": "0x1"}),
        (ASM, {"debugId": "0" * 33, "startAddress": "0x1", "size": "0x1\n"}),
    ],
)
def test_request_beyond_its_bounds_is_refused(site: Site, path: str, body: object) -> None:
    reply = site.server.post(path, body)
    assert reply.status == 400
    assert list(json.loads(reply.body)) == ["error"]


@pytest.mark.parametrize("text", ["\0", "../x", "\u202e", "x" * 100_000, "%s%n", '"\\', "\ud800"])
def test_names_of_modules_are_only_repeated(site: Site, text: str) -> None:
    body = {"memoryMap": [[text, site.plain.module[1]]], "stacks": [[[0, 1]], []]}
    reply = site.server.post(SYMBOLICATE, body)
    if text == "\ud800":
        assert reply.status == 400
        return
    result = json.loads(reply.body)["results"][0]
    assert result["stacks"][0][0]["module"] == text
    assert result["found_modules"] == {f"{text}/{site.plain.module[1]}": True}
    for name in ("debugId", "codeId"):
        fields = {name: text, "startAddress": "0x1", "size": "0xffffffffffffffff"}
        assert list(json.loads(site.server.post(ASM, fields).body)) == ["error"]


def test_long_body_is_refused_however_it_is_announced(site: Site) -> None:
    with contextlib.closing(site.server.connect()) as client:
        client.send((HEAD % ASM + f"Content-Length: {1 << 40}\r\n\r\n").encode())
        reply = client.reply()
        assert (reply.status, list(json.loads(reply.body))) == (413, ["error"])
    with contextlib.closing(site.server.connect()) as client:
        client.send((HEAD % ASM + "Transfer-Encoding: chunked\r\n\r\n").encode())
        chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        with contextlib.suppress(OSError):
            for _ in range(messages.MAX_BODY // 0x10000 + 1):
                client.send(chunk)
        assert client.reply().status == 413
    with contextlib.closing(site.server.connect()) as client:
        client.send(
            b"POST /buildid/00/executable HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\n"
        )
        assert client.reply().status == 413
    assert site.server.post(ASM, b"{}", Content_Encoding="gzip").status == 415
    assert site.server.ask(ASM).status == 405
    assert site.server.ask(ASM, "PUT").status == 405


def test_body_in_pieces_and_one_after_the_other(site: Site) -> None:
    body = json.dumps({"memoryMap": [site.plain.module], "stacks": [[[0, 3]]]}).encode()
    expected = site.server.post(SYMBOLICATE, body).body
    head = HEAD % SYMBOLICATE
    whole = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    with contextlib.closing(site.server.connect()) as client:
        client.send(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        client.send(b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
        assert client.reply().body == expected
        client.send(whole * 3 + b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert [client.reply().body for _ in range(3)] == [expected] * 3
        assert client.reply().body.startswith(b"buildidfs ")
        client.send(f"{head}Expect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n".encode())
        assert client.reply().status == 100
        client.send(body)
        assert client.reply().body == expected


def posting(server: Server, size: int, length: int = messages.MAX_BODY) -> Client:
    """A client that has sent ``size`` bytes of a body of ``length`` bytes."""
    client = server.connect()
    client.send((HEAD % ASM + f"Content-Length: {length}\r\n\r\n").encode())
    with contextlib.suppress(OSError):
        client.send(b" " * size)
    return client


def test_bodies_of_many_clients_have_little_room(site: Site) -> None:
    (worker,) = site.server.workers()

    def memory() -> int:
        status = Path(f"/proc/{worker}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) << 10

    before = memory()
    size = messages.MAX_BODY - 1
    with contextlib.ExitStack() as stack:
        clients = [posting(site.server, size) for _ in range(60)]
        for client in clients:
            stack.callback(client.close)
        refused = 0
        for client in clients:
            client.socket.settimeout(0.2)
            with contextlib.suppress(TimeoutError, OSError):
                reply = client.reply()
                refused += reply.status == 503 and "retry-after" in reply.headers
        assert refused >= 10
        assert memory() - before < 80 << 20
        assert site.server.ask("/").status == 200
        for client in clients:
            client.close()
        large = b" " * (messages.MAX_BODY - 20) + b'{"jobs":[]}'
        until(lambda: site.server.post(SYMBOLICATE, large).status == 200, "room again")


def another_client(server: Server, address: str) -> Client:
    """A connection from another address of this machine, which is another client."""
    client = server.connect()
    host, port = client.socket.getpeername()
    client.socket.close()
    client.socket = socket.create_connection((host, port), 60, (address, 0))
    return client


def test_client_with_many_requests_waits_for_itself(site: Site) -> None:
    many = {"memoryMap": [site.plain.module], "stacks": [[[0, n] for n in range(20_000)]]}
    body = json.dumps(many).encode()
    head = (HEAD % SYMBOLICATE + f"Content-Length: {len(body)}\r\n\r\n").encode()
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(contextlib.closing(site.server.connect())) for _ in "x" * 30]
        for client in clients:
            client.send(head + body)

        def answered() -> int:
            poll = select.poll()
            for client in clients:
                poll.register(client.socket, select.POLLIN)
            return len(poll.poll(0))

        before = answered()
        assert before < 20
        other = another_client(site.server, "127.0.0.2")
        stack.callback(other.close)
        few = {"memoryMap": [site.plain.module], "stacks": [[[0, 1]]]}
        assert other.post(SYMBOLICATE, few).status == 200
        assert answered() <= before + 5
        assert {client.reply().status for client in clients} == {200}


def test_clients_that_end_no_body_leave_room_for_another(site: Site) -> None:
    size = messages.MAX_BODY - 1
    body = b" " * (messages.MAX_BODY - 20) + b'{"jobs":[]}'
    with contextlib.ExitStack() as stack:
        for _ in range(60):
            stack.callback(posting(site.server, size).close)
        other = stack.enter_context(contextlib.closing(another_client(site.server, "127.0.0.2")))
        assert other.post(SYMBOLICATE, body).status == 200


def test_trailers_have_a_bound_and_are_no_headers(site: Site) -> None:
    head = HEAD % ASM + "Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
    with contextlib.closing(site.server.connect()) as client:
        client.send(head.encode() + b"Content-Encoding: gzip\r\n\r\n")
        assert client.reply().status == 400  # and not 415
    with contextlib.closing(site.server.connect()) as client:
        client.send(head.encode() + b"X: " + b"x" * (1 << 20))
        assert client.reply().status == 431


def test_answers_that_nobody_takes_have_little_room(site: Site) -> None:
    body = json.dumps(stacks([[0, 1]] * 100_000)).encode()
    head = (HEAD % SYMBOLICATE + f"Content-Length: {len(body)}\r\n\r\n").encode()
    size = len(site.server.post(SYMBOLICATE, body).body)
    assert size > 4 << 20
    (worker,) = site.server.workers()

    def memory() -> int:
        status = Path(f"/proc/{worker}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) << 10

    before = memory()
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(contextlib.closing(site.server.connect(4096))) for _ in "x" * 20
        ]
        for client in clients:
            client.send(head + body)
        for client in clients:
            client.begin()
        assert memory() - before < 70 << 20
        assert site.server.ask("/healthz").status == 200
        refused = [client for client in clients if b" 503 " in client.started()]
        assert len(refused) >= 10
    until(lambda: site.server.post(SYMBOLICATE, body).status == 200, "room again")


def test_body_that_never_ends_is_given_up(site: Site) -> None:
    with serving(site.buildidfs.store, config=f"{NO_RATE}timeout = 2\n") as server:
        begun = time.monotonic()
        with contextlib.closing(posting(server, 100)) as client:
            assert client.reply().status == 408
        assert time.monotonic() - begun > 2


def test_client_that_goes_away_harms_nobody(site: Site) -> None:
    body = {"memoryMap": [site.plain.module], "stacks": [[[0, n] for n in range(4000)]]}
    data = json.dumps(body).encode()
    for _ in range(20):
        client = site.server.connect()
        client.send((HEAD % SYMBOLICATE + f"Content-Length: {len(data)}\r\n\r\n").encode())
        client.send(data)
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.close()
    assert site.names(site.plain, site.plain.start("main"))["found_modules"][site.plain.key]


def test_files_are_served_while_stacks_are_named(site: Site) -> None:
    offsets = [[0, n] for n in range(0, 60_000)]
    body = json.dumps({"memoryMap": [site.fixed.module], "stacks": [offsets]}).encode()
    with contextlib.closing(site.server.connect()) as client:
        head = HEAD % SYMBOLICATE + f"Content-Length: {len(body)}\r\n\r\n"
        client.send(head.encode() + body)
        for _ in range(20):
            reply = site.server.ask(f"/buildid/{site.plain.build_id}/executable")
            assert reply.body == site.plain.path.read_bytes()
        answer = client.reply()
    assert answer.status == 200
    assert len(json.loads(answer.body)["results"][0]["stacks"][0]) == len(offsets)


def test_killed_symbolizer_is_replaced(site: Site) -> None:
    assert site.names(site.plain, site.plain.start("main"))["found_modules"][site.plain.key]
    (worker,) = site.server.workers()
    for task in Path(f"/proc/{worker}/task").iterdir():
        for child in (task / "children").read_text().split():
            os.kill(int(child), signal.SIGKILL)
    offset = site.plain.start("middle") + 2
    assert site.names(site.plain, offset)["stacks"][0][0]["function"] == "middle"


def test_damaged_debuginfo_costs_its_names_only(site: Site, directory: Path) -> None:
    bad = compiled(directory, "bad")
    data = bytearray(bad.path.read_bytes())
    at = data.index(b".debug_line")
    data[at : at + 400] = os.urandom(400)
    data[len(data) // 2 : len(data) // 2 + 600] = os.urandom(600)
    (directory / "bin/bad").write_bytes(data)
    site.buildidfs("scan", "tree", directory / "bin")
    result = site.names(bad, *range(0x1000, 0x1200))
    assert len(result["stacks"][0]) == 0x200
    assert ask(site, ASM, bad, startAddress="0x1100", size="0x100000")["size"]
    main = site.names(site.plain, site.plain.start("main"))["stacks"][0][0]
    assert main["function"] == "main"


def test_store_that_was_deleted_is_no_answer(site: Site, directory: Path) -> None:
    store = directory / "store"
    shutil.copytree(site.buildidfs.store, store)
    body = {"memoryMap": [["x", debug_id("ef" * 20)]], "stacks": [[[0, 1]]]}
    with serving(store, config=NO_RATE) as server:
        assert json.loads(server.post(SYMBOLICATE, body).body)["results"]
        with contextlib.closing(server.connect()) as client:
            assert client.ask("/").status == 200
            shutil.rmtree(store)
            with contextlib.suppress(EOFError, ConnectionError):
                reply = client.post(SYMBOLICATE, body)
                assert (reply.status, list(json.loads(reply.body))) == (503, ["error"])
        shutil.copytree(site.buildidfs.store, store, dirs_exist_ok=True)


def test_requests_are_counted(site: Site) -> None:
    text = site.server.ask("/metrics").body.decode()
    for kind in ("symbolicate", "source/v1", "asm"):
        found = re.search(rf'^http_requests_total{{type="{kind}"}} (\d+)$', text, re.MULTILINE)
        assert found is not None, kind
