# SPDX-License-Identifier: Apache-2.0
"""The commands as a user runs them: output, exit status, and one clear line for every mistake."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from buildidfs import config
from buildidfs.cli.main import cli
from buildidfs.store import Store
from tests.support.clients.terminals import on_terminal
from tests.support.elf.elfwriter import ET_REL, elf_file
from tests.support.harness.captures import capture, sighting
from tests.support.harness.mounts import BuildIdFs
from tests.support.harness.restricted import as_nobody
from tests.support.harness.scans import without_privileges

BUILD_ID = bytes.fromhex("8e9fd827446c24067541ac5390e6f527fb5947bb")
NEIGHBOUR = bytes.fromhex("8e9fd827446c24067541ac5390e6f527fb5947cc")


def run(
    *args: str | os.PathLike[str], code: int = 0, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run the command; a traceback or another exit status than expected is a failure."""
    words = [os.fsdecode(word) for word in args]
    environ = {**os.environ, **(env or {})}
    if BuildIdFs.warm is not None and BuildIdFs.warm.suits(words, environ):
        status, out, err = BuildIdFs.warm.run(words, 60, environ)
        assert status is not None, f"{words} has not ended"
        done = subprocess.CompletedProcess(words, status, out, err)
    else:
        done = subprocess.run(
            [sys.executable, "-m", "buildidfs", *words],
            capture_output=True,
            timeout=60,
            env=environ,
            check=False,
        )
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    assert done.returncode == code, (args, done.returncode, done.stderr.decode())
    if code not in (0, 3):
        lines = done.stderr.decode().strip().splitlines()
        assert len([line for line in lines if line.startswith("buildidfs: ")]) <= 1 or code == 2
        assert lines, "an error without a word"
    return done


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A directory with two ELF files, a name that is not UTF-8, and what is not ELF."""
    root = tmp_path / "tree"
    (root / "lib").mkdir(parents=True)
    (root / "lib" / "first.so").write_bytes(elf_file(build_id=BUILD_ID))
    second = os.path.join(os.fsencode(root), b"lib", b"caf\xe9.so")
    with open(second, "wb") as file:
        file.write(elf_file(build_id=NEIGHBOUR))
    (root / "readme").write_text("not ELF\n")
    (root / "cut").write_bytes(elf_file(build_id=BUILD_ID)[:30])
    (root / "empty").touch()
    return root


@pytest.fixture
def store(tmp_path: Path, tree: Path) -> Path:
    path = tmp_path / "store"
    run("--store", path, "scan", "tree", tree)
    return path


def test_scan_says_what_it_did(tmp_path: Path, tree: Path) -> None:
    path = tmp_path / "new"
    first = json.loads(run("--store", path, "scan", "tree", "--json", tree).stdout)
    assert first["captured"] == 2
    assert first["absent"] == {
        "not an ELF file": 1,
        "truncated ELF file": 1,
        "empty file": 1,
    }
    assert first["unreadable"] == []
    text = run("--store", path, "scan", "tree", tree).stdout.decode()
    assert "truncated ELF file" in text
    assert path.stat().st_mode & 0o777 == 0o700


def test_dry_run_changes_nothing(tmp_path: Path, tree: Path) -> None:
    path = tmp_path / "none"
    done = run("--store", path, "scan", "tree", "--dry-run", "--json", tree)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["build_id"] for row in found} == {BUILD_ID.hex(), NEIGHBOUR.hex()}
    assert not path.exists()
    assert b"truncated" in done.stderr


def test_list_as_json(store: Path, tree: Path) -> None:
    done = run("--store", store, "list", "--json")
    rows = {row["build_id"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert set(rows) == {BUILD_ID.hex(), NEIGHBOUR.hex()}
    plain = rows[BUILD_ID.hex()]
    file = tree / "lib" / "first.so"
    assert plain["path"] == str(file)
    assert "path_b64" not in plain
    assert plain["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    odd = rows[NEIGHBOUR.hex()]
    assert base64.b64decode(odd["path_b64"]).endswith(b"/caf\xe9.so")


def test_list_filters(store: Path) -> None:
    assert run("--store", store, "list", "--path", "*/first.so").stdout.count(b"\n") == 1
    assert run("--store", store, "list", "--path", "*/none").stdout == b""
    assert run("--store", store, "list", "--kind", "vdso").stdout == b""
    assert run("--store", store, "list", "--container", "docker:00", code=30).stdout == b""
    human = run("--store", store, "list").stdout.decode()
    assert "caf\\xe9.so" in human


def test_store_from_the_environment(store: Path) -> None:
    assert run("list", env={"BUILDIDFS_STORE": str(store)}).stdout.count(b"\n") == 2


def test_store_from_the_configuration_file(store: Path, tmp_path: Path) -> None:
    config = tmp_path / "buildidfs.toml"
    config.write_text(f'[store]\npath = "{store}"\n')
    assert run("--config", config, "list").stdout.count(b"\n") == 2
    config.write_text("[stroe]\n")
    assert b"stroe" in run("--config", config, "list", code=2).stderr


def test_get_by_unique_prefix(store: Path, tree: Path, tmp_path: Path) -> None:
    wanted = (tree / "lib" / "first.so").read_bytes()
    prefix = BUILD_ID.hex()[:-1]
    assert run("--store", store, "get", prefix).stdout == wanted
    output = tmp_path / "out"
    run("--store", store, "get", BUILD_ID.hex().upper(), "-o", output)
    assert output.read_bytes() == wanted


def test_get_refuses_what_it_cannot_give(store: Path, tmp_path: Path) -> None:
    shared = BUILD_ID.hex()[:8]
    assert b"ambiguous" in run("--store", store, "get", shared, code=2).stderr
    assert b"0123" in run("--store", store, "get", "0123", code=30).stderr
    assert b"'xyz'" in run("--store", store, "get", "xyz", code=2).stderr
    run("--store", store, "get", BUILD_ID.hex(), "--kind", "debuginfo", code=30)
    there = tmp_path / "missing" / "out"
    assert b"missing" in run("--store", store, "get", BUILD_ID.hex(), "-o", there, code=2).stderr


def test_get_never_writes_to_a_terminal(store: Path) -> None:
    leader, follower = pty.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "buildidfs", "--store", store, "get", BUILD_ID.hex()],
            stdout=follower,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    finally:
        os.close(follower)
        os.close(leader)
    assert done.returncode == 2
    assert b"-o FILE" in done.stderr


def test_get_detects_bytes_that_changed(store: Path, tmp_path: Path) -> None:
    digest = json.loads(run("--store", store, "show", "--json", BUILD_ID.hex()).stdout)
    digest = digest["variants"][0]["sha256"]
    blob = store / "blobs" / digest[:2] / digest
    blob.chmod(0o600)
    damaged = bytearray(blob.read_bytes())
    damaged[-1] ^= 1
    blob.write_bytes(damaged)
    output = tmp_path / "out"
    assert (
        b"has not the bytes that were captured"
        in run("--store", store, "get", BUILD_ID.hex(), "-o", output, code=20).stderr
    )
    assert not output.exists()
    assert run("--store", store, "get", BUILD_ID.hex(), code=20).stdout == b""


def test_show(store: Path, tree: Path) -> None:
    shown = json.loads(run("--store", store, "show", "--json", BUILD_ID.hex()).stdout)
    assert shown["origins"][0]["path"] == str(tree / "lib" / "first.so")
    assert any("debuginfo" in text for text in shown["missing"])
    text = run("--store", store, "show", BUILD_ID.hex()).stdout.decode()
    assert BUILD_ID.hex() in text
    assert "(served)" in text
    run("--store", store, "show", "ab" * 20, code=30)


def test_stats(store: Path) -> None:
    counted = json.loads(run("--store", store, "stats", "--json").stdout)
    assert counted["build_ids"] == 2
    assert counted["blobs"] == 2
    assert counted["host_build_ids"] > 0
    assert 0.0 <= counted["coverage"] <= 1.0
    assert b"coverage" in run("--store", store, "stats").stdout


@pytest.mark.root
def test_stats_of_a_user_say_how_many_processes_were_seen(directory: Path) -> None:
    program = BuildIdFs(directory)
    program("scan", "tree", "/bin/true")
    subprocess.run(["chown", "-R", "nobody:", program.store], check=True)
    directory.chmod(0o755)
    done = as_nobody("--store", program.store, "stats", "--json")
    counted = json.loads(done.out)
    assert 0 < counted["host_processes"] - counted["host_unseen"] < counted["host_unseen"]
    done = as_nobody("--store", program.store, "stats")
    line = next(line for line in done.out.splitlines() if line.startswith("coverage"))
    found = re.search(r", of (\d+) of (\d+) processes only$", line)
    assert found, line
    assert 0 < int(found[1]) < int(found[2]) / 2


@pytest.mark.root
def test_files_without_a_build_id_are_named_with_v(directory: Path) -> None:
    place, program = directory / "place", BuildIdFs(directory)
    place.mkdir()
    (place / "text").write_text("text")
    (place / "nameless").write_bytes(elf_file(etype=ET_REL))  # programs get an adopted ID
    (place / "true").write_bytes(Path("/bin/true").read_bytes())
    for words in (["scan", "tree", place], ["scan", "tree", "--dry-run", place]):
        assert "nameless" not in str(program(*words))
        shown = program("-v", *words)
        assert f"{place}/nameless: ELF file without a build ID" in shown.err, shown
        assert f"{place}/text" not in shown.err
        for count in ("1 skipped: not an ELF file", "1 skipped: ELF file without"):
            assert count in shown.out + shown.err


@pytest.mark.parametrize("command", ["list", "stats", "show", "get"])
def test_missing_store(command: str, tmp_path: Path) -> None:
    arguments = ["ab" * 20] if command in ("show", "get") else []
    done = run("--store", tmp_path / "none", command, *arguments, code=11)
    assert b"scan" in done.stderr  # the remedy


def test_store_of_another_format_is_refused_and_repaired(store: Path) -> None:
    (store / "format").write_text("buildidfs store 99\n")
    said = run("--store", store, "list", code=13).stderr
    assert b"has format 99, this program reads 1: " in said
    assert b"check --repair" in said
    assert said.count(b"\n") == 1
    found = run("--store", store, "check", code=20)
    assert b"has format 99" in found.stdout
    assert (store / "format").read_text() == "buildidfs store 99\n"
    run("--store", store, "check", "--repair")
    assert BUILD_ID.hex() in run("--store", store, "list").stdout.decode()


def test_scan_of_what_is_not_there(tmp_path: Path) -> None:
    done = run("--store", tmp_path / "store", "scan", "tree", tmp_path / "none", code=3)
    assert b"none" in done.stdout + done.stderr
    run("--store", tmp_path / "store", "scan", "tree", code=2)


def shell(command: str) -> subprocess.CompletedProcess[bytes]:
    """Run a line of shell in which ``buildidfs`` is the command."""
    function = f'buildidfs() {{ "{sys.executable}" -m buildidfs "$@"; }}\n'
    return subprocess.run(
        ["sh", "-c", function + command], capture_output=True, timeout=60, check=False
    )


@pytest.mark.parametrize("command", ["list", "list --json", f"get {BUILD_ID.hex()}", "stats"])
@pytest.mark.parametrize("buffering", ["", "1"])
def test_interrupted_reader_is_no_error_of_ours(store: Path, command: str, buffering: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "buildidfs", "--store", store, *command.split()],
            stdout=writing, stderr=subprocess.PIPE, timeout=60, check=False,
            env={**os.environ, "PYTHONUNBUFFERED": buffering},
        )  # fmt: skip
    finally:
        os.close(writing)
    assert done.stderr == b""
    assert done.returncode == 128 + signal.SIGPIPE


@pytest.mark.parametrize("command", ["list", "list --json", f"get {BUILD_ID.hex()}", "--help"])
@pytest.mark.parametrize("buffering", ["", "1"])
@pytest.mark.parametrize("output", ["> /dev/full", ">&-"])
def test_output_that_cannot_be_written(
    store: Path, command: str, buffering: str, output: str
) -> None:
    done = shell(
        f"export PYTHONUNBUFFERED={buffering}; buildidfs --store {store} {command} {output}"
    )
    assert done.returncode == 2
    assert done.stderr.startswith(b"buildidfs: cannot write the output: ")
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (2, ["coverage", "EVIL"]),
        (2, ["repair", "EVIL", "-o", "x"]),
        (2, ["bundle", BUILD_ID.hex(), "-o", "EVIL"]),
        (2, ["import", "EVIL"]),
        (2, ["get", BUILD_ID.hex(), "-o", "EVIL"]),
        (40, ["mount", "EVIL"]),
        (40, ["unmount", "EVIL"]),
        (2, ["mount", "-o", "EVIL", "/"]),
        (2, ["--config", "EVIL", "list"]),
        (30, ["which", "EVIL"]),
    ],
)
def test_errors_are_one_line_whatever_is_named(store: Path, code: int, words: list[str]) -> None:
    evil = "/none/\x1b[31m\nevil"
    done = run("--store", store, *(evil if word == "EVIL" else word for word in words), code=code)
    assert done.stderr.startswith(b"buildidfs: ")
    assert done.stderr.count(b"\n") == 1
    assert rb"\x1b[31m\nevil" in done.stderr


def test_global_options_stand_anywhere(store: Path, tree: Path, tmp_path: Path) -> None:
    listed = run("--store", store, "list").stdout
    assert listed
    assert run("list", "--store", store).stdout == listed
    assert run("--store", tmp_path / "none", "list", f"--store={store}").stdout == listed
    env = {"BUILDIDFS_STORE": str(store)}
    assert run("--store", tmp_path / "none", "list", code=11, env=env).stdout == b""
    assert run("list", "--store", tmp_path / "none", code=11, env=env).stdout == b""
    new = tmp_path / "new"
    assert run("scan", "--store", new, "tree", "-q", tree).stdout == b""
    assert run("scan", "tree", tree, "--store", new, "-vv").stderr
    # A command that has such an option itself keeps it.
    assert b"keep\t" in run("prune", "-n", "-v", "--store", new).stdout
    assert b"no such option" in run("list", "--nonsense", code=2).stderr
    config = tmp_path / "bad.toml"
    config.write_text("stroe = 1")
    assert b"stroe" in run("list", "--store", store, "--config", config, code=2).stderr


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("lst", "'list'"), ("ls", "'list'"), ("rm", "'remove'"), ("umount", "'unmount'"),
        ("proc", "'scan proc'"), ("perfdata", "'scan perf-data'"), ("scan pakage", "'package'"),
        ("list --pth x", "--path"), ("list --stor x", "--store"),
    ],
)  # fmt: skip
def test_mistyped_words_have_a_suggestion(words: str, meant: str) -> None:
    error = run(*words.split(), code=2).stderr.decode()
    assert meant in error
    assert error.count("\n") == 1


def test_no_suggestion_is_made_up() -> None:
    said = run("xyzzy", code=2).stderr
    assert said == b"buildidfs: no such command 'xyzzy' (see buildidfs --help)\n"


def test_help_has_each_command_in_one_section() -> None:
    lines = run("--help").stdout.decode().splitlines()
    headings = ["Capture:", "Look up:", "Profiles and core files:", "Keep and remove:", "Health:"]
    assert [line for line in lines if line in headings] == headings
    body = lines[lines.index("Capture:") : lines.index("  EXAMPLES:")]
    named = [line.split()[0] for line in body if line.startswith("  ")]
    assert sorted(named) == sorted(cli.list_commands(click.Context(cli)))
    assert not [line for line in body if line.endswith("...")]


def test_closed_streams_do_no_harm(store: Path, tree: Path) -> None:
    done = shell(f"buildidfs --store {store} scan tree {tree} <&- >&- 2>&-")
    assert done.returncode == 2
    assert run("--store", store, "list").stdout.count(b"\n") == 2


@pytest.mark.parametrize(
    "words", ["lst", "list --pth x", "show", "get --kind elf 00", "scan proc --pid one", "scan tre"]
)
def test_mistakes_are_one_line(words: str) -> None:
    error = run(*words.split(), code=2).stderr.decode()
    assert re.fullmatch(r"buildidfs: [a-z].* \(see buildidfs.* --help\)\n", error), error


def test_a_configuration_file_that_is_named_is_read(store: Path, tmp_path: Path) -> None:
    missing = tmp_path / "missing.toml"
    assert b"missing.toml" in run("--config", missing, "--store", store, "list", code=2).stderr


def test_verbose_says_what_is_captured(tmp_path: Path, tree: Path) -> None:
    store = tmp_path / "store"
    first, again = (run("-v", "--store", store, "scan", "tree", tree).stderr for _ in range(2))
    assert f"buildidfs: captured {tree}/lib/first.so ({BUILD_ID.hex()})\n".encode() in first
    assert b"caf\\xe9.so" in first
    assert b"captured" not in again


def test_quiet_says_only_what_went_wrong(tmp_path: Path, tree: Path) -> None:
    store = tmp_path / "store"
    assert run("-q", "--store", store, "scan", "tree", tree).stdout == b""
    done = run("-q", "--store", store, "scan", "tree", tmp_path / "none", code=3)
    assert done.stdout == b""
    assert b"none" in done.stderr


@pytest.mark.root
def test_one_unreadable_path_does_not_stop_the_others() -> None:
    with tempfile.TemporaryDirectory() as hidden, without_privileges():
        done = CliRunner().invoke(
            cli, ["scan", "tree", "--dry-run", hidden, "/usr/bin/env"], standalone_mode=False
        )
    assert done.return_value == 3, done.output
    assert f"{hidden}: Permission denied" in done.output
    assert " /usr/bin/env\n" in done.output


def complete(words: str, position: int) -> bytes:
    """What bash is told that a word may become."""
    env = {
        "_BUILDIDFS_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(position),
    }
    return run(env=env).stdout


def test_completion_knows_commands_and_build_ids(store: Path) -> None:
    assert b"unmount" in complete("buildidfs unm", 1)
    offered = complete(f"buildidfs --store {store} show {BUILD_ID.hex()[:5]}", 4)
    assert BUILD_ID.hex().encode() in offered
    # Global options count wherever they stand.
    offered = complete(f"buildidfs show --store {store} {BUILD_ID.hex()[:5]}", 4)
    assert BUILD_ID.hex().encode() in offered


def test_completion_knows_paths_and_containers_that_need_no_quotes(tmp_path: Path) -> None:
    paths = [b"/usr/lib/x/liba.so", b"/usr/lib/x/libb.so", b"/usr/lib/x/$(reboot)", b"/opt/app"]
    with Store.create(tmp_path / "store") as store:
        for number, path in enumerate(paths):
            at = sighting(path, container="docker:0101" if number else "x:`reboot`")
            store.commit([capture(store, path, bytes([number]) * 20, at=at)])

    def offered(words: str) -> list[str]:
        line = f"buildidfs --store {tmp_path / 'store'} {words}"
        said = complete(line, len(line.split()) - 1 + line.endswith(" ")).decode()
        return [each.removeprefix("plain,") for each in said.splitlines() if each]

    for words in ("which", "show", "list --path", "journal --path"):
        # A directory that is the only choice is entered.
        assert offered(f"{words} /us") == ["/usr/lib/x/liba.so", "/usr/lib/x/libb.so"], words
    assert offered("which /") == ["/opt/", "/usr/"]
    assert offered("which /usr/lib/x/liba") == ["/usr/lib/x/liba.so"]
    assert offered("which /nothing") == []
    assert offered("list --container ") == ["docker:0101"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_has_a_script_for_each_shell(shell: str) -> None:
    said = run(env={"_BUILDIDFS_COMPLETE": f"{shell}_source"}).stdout
    assert f"_BUILDIDFS_COMPLETE={shell}_complete".encode() in said


def test_config_says_where_each_setting_is_from(tmp_path: Path) -> None:
    file = tmp_path / "buildidfs.toml"
    file.write_text('[store]\npath = "/srv/one"\n[watch]\npin-bytes = "1GiB"\n')

    def settings(*words: str | Path, **env: str) -> dict[str, tuple[object, str]]:
        done = run("config", "--json", *words, env={"NODE_NAME": "", **env})
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        return {row["key"]: (row["value"], row["source"]) for row in rows}

    found = settings("--config", file)
    assert set(config.known_keys()) | {"config", "hostname"} == set(found)
    assert found["config"] == (str(file), "option --config")
    assert found["store.path"] == ("/srv/one", f"file {file}")
    assert found["watch.pin-bytes"] == ("1GiB", f"file {file}")
    assert found["watch.pin-seconds"] == (30, "default")
    found = settings("--config", file, BUILDIDFS_STORE="/srv/two")
    assert found["store.path"] == ("/srv/two", "environment BUILDIDFS_STORE")
    found = settings("--store", "/srv/three", "--hostname", "node-7", BUILDIDFS_STORE="/srv/two")
    assert found["store.path"] == ("/srv/three", "option --store")
    assert found["hostname"] == ("node-7", "option --hostname")
    variables = {"DEBUGINFOD_URLS": "file:///a file:///b", "DEBUGINFOD_TIMEOUT": "7"}
    found = settings(**variables)
    both = ["file:///a", "file:///b"]
    assert found["upstream.urls"] == (both, "environment DEBUGINFOD_URLS")
    assert found["upstream.timeout"] == (7, "environment DEBUGINFOD_TIMEOUT")
    file.write_text('[upstream]\nurls = ["/srv/four"]\ntimeout = 3\n')
    found = settings("--config", file, **variables)
    from_both = f"file {file}, environment DEBUGINFOD_URLS"
    assert found["upstream.urls"] == (["/srv/four", *both], from_both)
    assert found["upstream.timeout"] == (3, f"file {file}")
    text = run("config").stdout.decode()
    assert "watch.pin-bytes\t2147483648\tdefault\n" in text
    assert "serve.listen\toff\tdefault\n" in text
    assert "retention.max-size\tno limit\tdefault\n" in text
    assert "mount.list-all\tfalse\tdefault\n" in text


def test_config_shows_units_on_a_terminal(tmp_path: Path) -> None:
    file = tmp_path / "buildidfs.toml"
    file.write_text('[watch]\npin-bytes = "1GiB"\n[retention]\nmax-age = 172800\n')
    shown = on_terminal(sys.executable, "-m", "buildidfs", "--config", file, "config", columns=200)
    found = dict(line.split()[:2] for line in shown.lines[1:])
    assert found["watch.pin-bytes"] == "1GiB"
    assert found["retention.max-age"] == "2d"
    rows = "\n".join(shown.lines)
    assert re.search(r"check.scrub-rate +8.0 MiB a second ", rows)
    assert re.search(r"serve.rate +500 requests a second ", rows)
    assert re.search(r"upstream.max-size +2.0 GiB ", rows)
    assert re.search(r"remote.refresh +1m ", rows)


@pytest.mark.parametrize("words", [["list", "--limit", "x"], ["list", "--limit", "1.5"]])
def test_number_that_is_none(words: list[str]) -> None:
    done = run(*words, code=2)
    assert f"invalid value for '--limit': '{words[-1]}' is not a whole number" in (
        done.stderr.decode()
    )


def test_number_that_is_too_small() -> None:
    assert b"'--limit': 0 is less than 1 (see" in run("list", "--limit", "0", code=2).stderr


def test_where_says_once_where_to_look() -> None:
    done = run("where", "--path", "*/libc.so*", code=2)
    assert done.stderr.count(b"see ") == 1
    assert b"buildidfs which --glob finds paths of the past" in done.stderr


def test_prune_says_why_nothing_goes(tmp_path: Path) -> None:
    Store.create(tmp_path / "store").close()
    words = ("--store", tmp_path / "store", "prune", "--dry-run", "--keep-free", "1M")
    said = run(*words, "--max-size", "1G").stdout.decode()
    assert said == (
        "0 blobs, 0 B, would go: the store is within its limits (1.0 GiB at most, 1.0 MiB free)\n"
    )


def test_messages_are_folded_at_words_on_a_terminal(tmp_path: Path) -> None:
    store = tmp_path / ("long-name-" * 12)
    shown = on_terminal(sys.executable, "-m", "buildidfs", "--store", store, "status", columns=60)
    assert shown.lines == [
        "buildidfs: no store at",
        f"{store}:",
        "a scan makes one, --store names another",
    ]
    piped = run("--store", store, "status", code=11).stderr.decode()
    assert piped == f"buildidfs: no store at {store}: a scan makes one, --store names another\n"


@pytest.mark.parametrize(
    "command",
    [[], ["scan"], ["scan", "proc"], ["scan", "tree"], ["mount"], ["unmount"], ["list"], ["show"],
     ["get"], ["stats"]],
)  # fmt: skip
def test_help(command: list[str]) -> None:
    text = run(*command, "--help").stdout.decode()
    assert "EXAMPLES:" in text
    assert "EXIT STATUS:" in text


def test_meanings_of_exit_statuses_are_folded() -> None:
    lines = run("fetch", "--help").stdout.decode().splitlines()
    assert max(map(len, lines)) <= 80
    assert "        core file" in lines


def test_unknown_option_has_a_suggestion_only_if_one_is_alike() -> None:
    said = run("list", "--containr", "web", code=2).stderr.decode()
    assert said.startswith("buildidfs: no such option '--containr'. Did you mean '--container'? (")
    said = run("stats", "--container", "web", code=2).stderr.decode()
    assert said == ("buildidfs: no such option '--container' (see buildidfs stats --help)\n")
