# SPDX-License-Identifier: Apache-2.0
"""Source files: captured below directories that the operator gave, served by path and build ID."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from buildidfs.names import SOURCES_PREFIX
from buildidfs.store import Store
from tests.support.clients.tools import Result, run, tool
from tests.support.containers import images, packages
from tests.support.elf.programs import build_id_of, gdb_script
from tests.support.filesystems.sources import entry
from tests.support.harness.waiting import until
from tests.support.servers.serving import Server, serving

if TYPE_CHECKING:
    from tests.support.harness.mounts import BuildIdFs

pytestmark = [pytest.mark.root, pytest.mark.client]

MAIN = '#include "part.h"\nint main(void)\n{\n    return part(3); /* here */\n}\n'
PART = "static inline int part(int x)\n{\n    return x * 2;\n}\n"
NO_RATE = "[serve]\nrate = 0\n"


class Tree:
    """A program and its sources, built in ``home``/build+dir."""

    def __init__(self, home: Path, *options: str) -> None:
        self.sources = home / "build+dir"
        self.sources.mkdir(parents=True)
        for name, text in (("ma in.c", MAIN), ("part.h", PART)):
            (self.sources / name).write_text(text)
        self.program = home / "bin/prog"
        self.program.parent.mkdir()
        argv = [tool("gcc"), "-g", "-O0", *options, "-Wl,--build-id", "-o", self.program]
        run([*argv, self.sources / "ma in.c"], check=True)
        self.build_id = build_id_of(self.program)

    def target(self, name: str, directory: Path | None = None) -> str:
        """The path of a source file at the server."""
        path = str((directory or self.sources) / name).replace(" ", "%20")
        return f"/buildid/{self.build_id}/source{path}"


@pytest.fixture
def tree(directory: Path) -> Tree:
    return Tree(directory)


def scan(buildidfs: BuildIdFs, tree: Tree, *options: str) -> dict[str, int]:
    found = buildidfs("scan", "tree", "--sources", "--json", *options, tree.program)
    return dict(json.loads(found.out)["sources"])


@pytest.fixture
def served(buildidfs: BuildIdFs, tree: Tree) -> Iterator[Server]:
    counts = scan(buildidfs, tree, "--source-dir", str(tree.sources))
    assert (counts["files"], counts["build_ids"]) == (2, 1)
    shutil.rmtree(tree.sources)
    with serving(buildidfs.store, config=NO_RATE) as server:
        yield server


def test_sources_are_served_after_they_are_gone(served: Server, tree: Tree) -> None:
    reply = served.ask(tree.target("ma in.c"))
    assert (reply.status, reply.body) == (200, MAIN.encode())
    assert reply.headers["x-debuginfod-file"] == f"{tree.sources}/ma in.c"
    assert reply.headers["x-debuginfod-size"] == str(len(MAIN))
    assert served.ask(tree.target("part.h")).body == PART.encode()
    assert served.ask(tree.target("../build+dir/./part.h")).body == PART.encode()
    assert served.ask(tree.target("part.h"), "HEAD").body == b""
    part = served.ask(tree.target("part.h"), Range="bytes=7-12")
    assert (part.status, part.body) == (206, PART.encode()[7:13])
    tag = reply.headers["etag"]
    assert served.ask(tree.target("ma in.c"), If_None_Match=tag).status == 304
    for other in ("none.c", "../../../../../../etc/passwd"):
        assert served.ask(tree.target(other)).status == 404
    assert served.ask("/buildid/" + "00" * 20 + "/source/x.c").status == 404


def test_debuggers_find_sources(served: Server, tree: Tree, tmp_path: Path) -> None:
    env = {"DEBUGINFOD_URLS": served.url, "DEBUGINFOD_CACHE_PATH": str(tmp_path / "cache")}
    path = str(tree.sources / "ma in.c")
    found = run([tool("debuginfod-find"), "source", tree.build_id, path], env=env)
    assert Path(found.out.strip()).read_text() == MAIN, str(found)
    gdb: Result = run(
        [
            tool("gdb"), "-nx", "-batch", "-iex", "set debuginfod enabled on",
            "-ex", "list main", tree.program,
        ],
        env={**env, "DEBUGINFOD_CACHE_PATH": str(tmp_path / "gdb")},
    )  # fmt: skip
    assert "/* here */" in gdb.out, str(gdb)


def test_source_with_a_name_that_clients_escape_is_found(
    buildidfs: BuildIdFs, directory: Path, tmp_path: Path
) -> None:
    source, program = directory / "p++r$#o^^g %41?&.c", directory / "prog"
    source.write_text(MAIN.replace("part(3)", "3").partition("\n")[2])
    run([tool("gcc"), "-g", "-Wl,--build-id", "-o", program, source], check=True)
    buildidfs("scan", "tree", "--source-dir", directory, program)
    with serving(buildidfs.store, config=NO_RATE) as server:
        env = {"DEBUGINFOD_URLS": server.url, "DEBUGINFOD_CACHE_PATH": str(tmp_path / "cache")}
        argv = [tool("debuginfod-find"), "source", program, str(source)]
        found = run(argv, env=env)
        assert Path(found.out.strip()).read_bytes() == source.read_bytes(), str(found)


def test_later_sources_replace_the_earlier_and_a_new_index_has_them(
    buildidfs: BuildIdFs, tree: Tree
) -> None:
    options = ("--source-dir", str(tree.sources))
    scan(buildidfs, tree, *options)
    (tree.sources / "part.h").write_text(PART + "/* new */\n")
    assert scan(buildidfs, tree, *options)["files"] == 2
    assert scan(buildidfs, tree, *options)["files"] == 2
    assert buildidfs("check").rc == 0
    shutil.rmtree(buildidfs.store / "index")
    buildidfs("check", "--repair", check=False)
    with serving(buildidfs.store, config=NO_RATE) as server:
        assert server.ask(tree.target("part.h")).body.endswith(b"/* new */\n")
        assert server.ask(tree.target("ma in.c")).body == MAIN.encode()
    with Store.open(buildidfs.store) as store:
        assert list(store.check()) == []


def test_sources_elsewhere_and_of_one_user_are_not_captured(
    buildidfs: BuildIdFs, tree: Tree
) -> None:
    nowhere = scan(buildidfs, tree)
    assert nowhere["files"] == 0
    assert nowhere["elsewhere"] >= 2
    (tree.sources / "part.h").chmod(0o600)
    counts = scan(buildidfs, tree, "--source-dir", str(tree.sources))
    assert (counts["files"], counts["absent"]) == (1, 1)
    with serving(buildidfs.store, config=NO_RATE) as server:
        assert server.ask(tree.target("part.h")).status == 404
        assert server.ask(tree.target("ma in.c")).status == 200


def everything(server: Server, tree: Tree) -> str:
    """What a server tells of a program and its sources, without being told its build ID."""
    targets = ["/metadata?key=glob&value=*", "/api/overview", "/metrics"]
    targets += [f"/api/search?q={word}" for word in ("prog", "*prog*", "sources", "/", "*")]
    until(lambda: json.loads(server.ask("/api/overview").body)["counted"], "the survey")
    return "".join(server.ask(target).body.decode() for target in targets)


def test_sources_tell_nothing_of_a_private_program(
    buildidfs: BuildIdFs, tree: Tree, directory: Path
) -> None:
    public = Tree(directory / "public", "-DPUBLIC=1")
    tree.program.parent.chmod(0o700)
    for each in (tree, public):
        assert scan(buildidfs, each, "--source-dir", str(each.sources))["files"] == 2
    kept_under = SOURCES_PREFIX.hex() + tree.build_id
    with serving(buildidfs.store, config=NO_RATE) as server:
        told = everything(server, tree)
        assert str(public.program) in told
        assert str(tree.program) not in told
        assert tree.build_id not in told
        assert server.ask(public.target("part.h")).status == 200
        assert server.ask(tree.target("part.h")).status == 404
        assert server.ask(f"/buildid/{kept_under}/debuginfo").status == 404


def test_sources_are_no_files_of_their_own(served: Server, tree: Tree) -> None:
    told = everything(served, tree)
    assert tree.build_id in told
    assert SOURCES_PREFIX.hex() + tree.build_id not in told
    assert served.ask(f"/api/id/{SOURCES_PREFIX.hex()}{tree.build_id}").status == 404


def test_moved_sources_are_served_under_the_path_of_the_debuginfo(
    buildidfs: BuildIdFs, tree: Tree, directory: Path
) -> None:
    moved = directory / "elsewhere"
    shutil.move(tree.sources, moved)
    assert scan(buildidfs, tree, "--source-dir", f"{tree.sources}={moved}")["files"] == 2
    with serving(buildidfs.store, config=NO_RATE) as server:
        assert server.ask(tree.target("part.h")).body == PART.encode()
        assert server.ask(tree.target("part.h", moved)).status == 404


def test_sources_with_relative_names_are_served(buildidfs: BuildIdFs, directory: Path) -> None:
    """Before DWARF 5, the directory of the compilation is only in the unit of a program."""
    sources, program = directory / "project/src", directory / "project/prog"
    sources.mkdir(parents=True)
    (sources / "main.c").write_text(MAIN)
    (sources / "part.h").write_text(PART)
    gcc = [tool("gcc"), "-g", "-gdwarf-4", "-O0", "src/main.c", "-Wl,--build-id", "-o", program]
    run(gcc, cwd=sources.parent, check=True)
    done = buildidfs("scan", "tree", "--sources", "--json", sources.parent)
    counts = json.loads(done.out)["sources"]
    assert (counts["files"], counts["relative"], counts["no_debuginfo"]) == (2, 0, 0)
    shutil.rmtree(sources)
    with serving(buildidfs.store, config=NO_RATE) as server:
        path = f"/buildid/{build_id_of(program)}/source{sources}/main.c"
        assert server.ask(path).body == MAIN.encode()
    # With no directory in the unit either, and with no debuginfo at all, that is the reason.
    sources.mkdir()
    (sources / "main.c").write_text(MAIN)
    (sources / "part.h").write_text(PART)
    run([*gcc, "-Wl,-z,noexecstack", f"-fdebug-prefix-map={sources.parent}=."],
        cwd=sources.parent, check=True)  # fmt: skip
    stripped = program.with_name("stripped")
    run([tool("gcc"), "-s", "-O1", "src/main.c", "-o", stripped], cwd=sources.parent, check=True)
    done = buildidfs("scan", "tree", "--sources", "--json", sources.parent)
    counts = json.loads(done.out)["sources"]
    assert (counts["files"], counts["relative"], counts["no_debuginfo"]) == (0, 2, 1)


def test_links_lead_to_no_file_outside_of_the_directory(buildidfs: BuildIdFs, tree: Tree) -> None:
    (tree.sources / "part.h").unlink()
    (tree.sources / "part.h").symlink_to("/etc/passwd")
    counts = scan(buildidfs, tree, "--source-dir", str(tree.sources))
    assert (counts["files"], counts["absent"]) == (1, 1)


def test_a_stranger_names_no_file_of_the_host(buildidfs: BuildIdFs, directory: Path) -> None:
    source = f'#line 1 "/etc/passwd"\nint other;\n#line 1 "{directory}/secret.c"\n{gdb_script("1")}'
    (directory / "secret.c").write_text("secret")
    home = directory / "stranger"
    home.mkdir()
    (home / "x.c").write_text(source + "int main(void) { return 0; }\n")
    program = home / "prog"
    run([tool("gcc"), "-g", "-Wl,--build-id", "-o", program, home / "x.c"], check=True)
    os.chown(program, 65534, 65534)
    buildidfs("scan", "tree", "--sources", "--source-dir", home, program)
    build_id = build_id_of(program)
    with serving(buildidfs.store, config=NO_RATE) as server:
        for path in ("/etc/passwd", f"{directory}/secret.c"):
            assert server.ask(f"/buildid/{build_id}/source{path}").status == 404


def test_source_with_the_longest_path_is_served(buildidfs: BuildIdFs, directory: Path) -> None:
    """As long as the kernel allows, and with each byte percent-encoded."""
    place = directory / "src"
    longest = os.pathconf("/", "PC_PATH_MAX") - 200
    names = ["d" * 200] * ((longest - len(str(place))) // 201)
    place.mkdir()
    at = os.open(place, os.O_RDONLY)
    for name in names:
        os.mkdir(name, 0o755, dir_fd=at)
        below = os.open(name, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    path = "/".join([str(place), *names, "long.c"])
    assert len(path) > 3500
    with os.fdopen(os.open("long.c", os.O_CREAT | os.O_WRONLY, 0o644, dir_fd=at), "w") as file:
        file.write("int main(void) { return 0; }\n")
    program = directory / "long"
    run([tool("gcc"), "-g", "-Wl,--build-id", "-o", program, path], check=True)
    os.close(at)
    counts = json.loads(buildidfs("scan", "tree", "--json", "--source-dir", place, program).out)[
        "sources"
    ]
    assert counts["files"] == 1
    encoded = "".join(f"%{byte:02x}" for byte in path.encode())
    with serving(buildidfs.store, config=NO_RATE) as server:
        for target in (path, encoded):
            reply = server.ask(f"/buildid/{build_id_of(program)}/source/{target}")
            assert (reply.status, reply.body) == (200, b"int main(void) { return 0; }\n")
        refused = server.ask("/buildid/" + "00" * 20 + "/source/" + "x" * 14_000)
        assert refused.status == 414


def test_counts_are_told_in_words(buildidfs: BuildIdFs, tree: Tree) -> None:
    result = buildidfs("scan", "tree", "--source-dir", tree.sources, tree.program)
    assert "2 source files of 1 build ID" in result.out, result
    elsewhere = buildidfs("scan", "tree", "--sources", tree.program)
    assert "name it with --source-dir" in elsewhere.err, elsewhere


# --- packages -------------------------------------------------------------------------------------


@pytest.fixture(params=["deb-xz", "rpm-zstd", "arch-zstd"])
def packaged(request: pytest.FixtureRequest, directory: Path) -> tuple[list[Path], str, Path]:
    """Packages of a program, its debug file and its sources; build ID and path of a source."""
    sources = Path("/usr/src/debug/packaged-1.0")
    made = Tree(directory, f"-ffile-prefix-map={directory / 'build+dir'}={sources}")
    parts = {}
    for part in ("app", "debug", "source"):
        parts[part] = directory / part
        parts[part].mkdir()
    program = parts["app"] / "usr/bin/prog"
    program.parent.mkdir(parents=True)
    debug = (
        parts["debug"] / f"usr/lib/debug/.build-id/{made.build_id[:2]}/{made.build_id[2:]}.debug"
    )
    debug.parent.mkdir(parents=True)
    run([tool("objcopy"), "--only-keep-debug", made.program, debug], check=True)
    run([tool("strip"), "-o", program, made.program], check=True)
    kept = parts["source"] / sources.relative_to("/")
    shutil.copytree(made.sources, kept)
    (kept / "other.c").write_text("nothing names it")
    for name in ("a.h", "z.h"):  # the bytes are with the first name in tar, with the last in cpio
        os.link(kept / "part.h", kept / name)
    packer = packages.PACKERS[request.param]
    found = []
    for name, root in parts.items():
        out = directory / f"out-{name}"
        out.mkdir()
        found.append(packer(root, out))
    return found, made.build_id, sources


def test_sources_in_packages_are_served(
    buildidfs: BuildIdFs, packaged: tuple[list[Path], str, Path]
) -> None:
    files, build_id, sources = packaged
    without = buildidfs("scan", "package", "--sources", *files[:2])
    assert "in no package that was given" in without.err, without
    done = buildidfs("scan", "package", "--sources", "--json", *files)
    assert json.loads(done.out)["sources"]["files"] == 2
    with serving(buildidfs.store, config=NO_RATE) as server:
        for name, text in (("ma%20in.c", MAIN), ("part.h", PART)):
            reply = server.ask(f"/buildid/{build_id}/source{sources}/{name}")
            assert (reply.status, reply.body) == (200, text.encode())
        assert server.ask(f"/buildid/{build_id}/source{sources}/other.c").status == 404


def test_sources_in_a_private_package_are_not_captured(
    buildidfs: BuildIdFs, packaged: tuple[list[Path], str, Path]
) -> None:
    files, build_id, sources = packaged
    files[-1].chmod(0o600)
    done = buildidfs("scan", "package", "--sources", "--json", *files)
    counts = json.loads(done.out)["sources"]
    assert (counts["files"], counts["absent"]) == (0, 2)
    with serving(buildidfs.store, config=NO_RATE) as server:
        assert server.ask(f"/buildid/{build_id}/source{sources}/part.h").status == 404


def test_sources_in_packages_that_not_all_may_read_are_not_captured(
    buildidfs: BuildIdFs, tree: Tree, directory: Path
) -> None:
    root = directory / "root"
    shutil.copytree(tree.sources, root / tree.sources.relative_to("/"))
    (root / tree.sources.relative_to("/") / "part.h").chmod(0o600)
    debug = root / f"usr/lib/debug/.build-id/{tree.build_id[:2]}/{tree.build_id[2:]}.debug"
    debug.parent.mkdir(parents=True)
    shutil.copy(tree.program, debug)
    done = buildidfs("scan", "package", "--sources", "--json", packages.deb(root, directory))
    assert json.loads(done.out)["sources"]["files"] == 1
    with serving(buildidfs.store, config=NO_RATE) as server:
        assert server.ask(tree.target("part.h")).status == 404
        assert server.ask(tree.target("ma in.c")).body == MAIN.encode()


def test_package_brings_no_sources_for_debuginfo_that_it_lacks(
    buildidfs: BuildIdFs, tree: Tree, directory: Path
) -> None:
    """A name in it is a claim."""
    buildidfs("scan", "tree", tree.program)
    root = directory / "root"
    shutil.copytree(tree.sources, root / tree.sources.relative_to("/"))
    link = root / f"usr/lib/debug/.build-id/{tree.build_id[:2]}/{tree.build_id[2:]}.debug"
    link.parent.mkdir(parents=True)
    link.symlink_to("/usr/lib/debug/elsewhere.debug")
    done = buildidfs("scan", "package", "--sources", "--json", packages.deb(root, directory))
    assert json.loads(done.out)["sources"]["files"] == 0
    with serving(buildidfs.store, config=NO_RATE) as server:
        assert server.ask(tree.target("ma in.c")).status == 404


# --- images ---------------------------------------------------------------------------------------

SOURCES = Path("/app/src")


class Imaged:
    """A program whose debug information names sources in `SOURCES`, and images that have both."""

    def __init__(self, directory: Path) -> None:
        self.tree = Tree(directory, f"-ffile-prefix-map={directory / 'build+dir'}={SOURCES}")
        self.layout = images.Layout(directory / "layout")
        self.program = images.layer(
            [(entry("app/prog", mode=0o755), self.tree.program.read_bytes())]
        )

    def target(self, name: str) -> str:
        """The path of a source file at the server."""
        return self.tree.target(name, SOURCES)


def source(name: str, text: str, mode: int = 0o644) -> tuple[tarfile.TarInfo, bytes]:
    """A source file as a member of a layer."""
    return entry(f"app/src/{name}", mode=mode), text.encode()


@pytest.fixture
def imaged(directory: Path) -> Imaged:
    return Imaged(directory)


def scan_image(buildidfs: BuildIdFs, *words: object) -> dict[str, int]:
    found = buildidfs("scan", "image", "--sources", "--json", *words)
    return dict(json.loads(found.out)["sources"])


def test_sources_in_images_are_served_as_containers_see_them(
    buildidfs: BuildIdFs, imaged: Imaged
) -> None:
    """The image has an older part.h in a lower layer, and the other file as a hard link."""
    old = images.layer([source("part.h", "replaced"), source("x.c", MAIN), source("none.c", "")])
    linked = images.layer(
        [
            source("a.c", MAIN),
            (entry("app/src/ma in.c", tarfile.LNKTYPE, "app/src/a.c"), b""),
            source("part.h", PART),
        ]
    )
    imaged.layout.image("app:1", old, imaged.program, linked)
    counts = scan_image(buildidfs, imaged.layout.directory)
    assert (counts["files"], counts["build_ids"], counts["kept"]) == (2, 1, 0)
    again = scan_image(buildidfs, "--root", imaged.layout.directory, "app:1")
    assert (again["files"], again["kept"]) == (0, 1)
    assert buildidfs("check").rc == 0
    (shown,) = map(json.loads, buildidfs("containers", "--json").out.splitlines())
    assert (shown["build_ids"], shown["coverage"]["executable"]) == (1, 1)
    with serving(buildidfs.store, config=NO_RATE) as server:
        assert server.ask(imaged.target("part.h")).body == PART.encode()
        assert server.ask(imaged.target("ma in.c")).body == MAIN.encode()
        assert server.ask(imaged.target("none.c")).status == 404


def test_image_brings_no_deleted_and_no_private_sources(
    buildidfs: BuildIdFs, imaged: Imaged
) -> None:
    low = images.layer([source("part.h", PART), source("ma in.c", MAIN)])
    private = images.layer([source("ma in.c", MAIN, 0o600), source(".wh.part.h", "")])
    imaged.layout.image("app:1", low, imaged.program, private)
    counts = scan_image(buildidfs, imaged.layout.directory)
    assert (counts["files"], counts["absent"]) == (0, 1)
    with serving(buildidfs.store, config=NO_RATE) as server:
        for name in ("part.h", "ma%20in.c"):
            assert server.ask(imaged.target(name)).status == 404


def test_private_image_brings_no_sources(buildidfs: BuildIdFs, imaged: Imaged) -> None:
    imaged.layout.image(
        "app:1", images.layer([source("part.h", PART), source("ma in.c", MAIN)]), imaged.program
    )
    archive = imaged.layout.archive(imaged.layout.directory.parent / "saved.tar")
    archive.chmod(0o600)
    counts = scan_image(buildidfs, archive)
    assert (counts["files"], counts["absent"]) == (0, 2)


def test_image_brings_no_sources_for_the_debuginfo_of_others(
    buildidfs: BuildIdFs, imaged: Imaged
) -> None:
    """Not for that of the host, even with the same bytes; and not for that of another image."""
    false = images.layer([source("part.h", "false"), source("ma in.c", "false")])
    imaged.layout.image("other:1", false)
    imaged.layout.image("app:1", images.layer([source("part.h", PART)]), imaged.program)
    assert scan_image(buildidfs, imaged.layout.directory)["files"] == 1
    imaged.layout.image("late:1", imaged.program, false)
    assert scan_image(buildidfs, imaged.layout.directory)["kept"] == 1
    with serving(buildidfs.store, config=NO_RATE) as server:
        assert server.ask(imaged.target("part.h")).body == PART.encode()
        assert server.ask(imaged.target("ma in.c")).status == 404


@pytest.mark.host
def test_image_brings_no_sources_for_a_program_of_the_host(
    buildidfs: BuildIdFs, imaged: Imaged
) -> None:
    buildidfs("scan", "tree", imaged.tree.program)
    imaged.layout.image("app:1", images.layer([source("part.h", "false")]), imaged.program)
    assert scan_image(buildidfs, imaged.layout.directory)["files"] == 0


def test_sources_in_layers_that_an_engine_has_unpacked_are_served(
    buildidfs: BuildIdFs, imaged: Imaged, directory: Path
) -> None:
    docker = images.DockerRoot(directory / "docker")
    low = docker.diff("low") / "app/src"
    low.mkdir(parents=True)
    (low / "part.h").write_text("replaced")
    (low / "ma in.c").write_text(MAIN)
    top = docker.diff("top") / "app/src"
    top.mkdir(parents=True)
    (top / "part.h").write_text(PART)
    shutil.copy(imaged.tree.program, top.parent / "prog")
    docker.image("app:1", "low", "top")
    assert scan_image(buildidfs, docker.directory)["files"] == 2
    with serving(buildidfs.store, config=NO_RATE) as server:
        assert server.ask(imaged.target("part.h")).body == PART.encode()
        assert server.ask(imaged.target("ma in.c")).body == MAIN.encode()
