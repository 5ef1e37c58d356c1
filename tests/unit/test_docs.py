# SPDX-License-Identifier: Apache-2.0
"""The documents and the program say the same: commands, options, exit codes, settings, format.

Manual pages are compared as a reader sees them, formatted; whatever is missing in them is missing
for him.
"""

from __future__ import annotations

import functools
import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
import pytest
from click.testing import CliRunner

from buildidfs import config, errors, names
from buildidfs.cli.main import cli
from buildidfs.mount import mountpoint as mount_options
from buildidfs.store import schema
from tests.support.clients.manuals import formatted, indent

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "man").iterdir())
FAMILIES = [path for path in PAGES if re.fullmatch(r"buildidfs-\w+\.1", path.name)]
DOCUMENTS = sorted(
    path for pattern in ("*.md", "docs/*.md", "benchmarks/*.md") for path in ROOT.glob(pattern)
)
TEXTS = DOCUMENTS + sorted(
    path
    for pattern in ("man/*", "examples/*", "Makefile", "scripts/*", "pyproject.toml")
    for path in ROOT.glob(pattern)
    if path.is_file()
)


@functools.cache
def page(name: str) -> str:
    """The text of a manual page, every run of blanks as one space."""
    return " ".join(formatted(ROOT / "man" / name).out.split())


def commands(
    command: click.Command = cli, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command with the words that lead to it; the program itself has none."""
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from commands(found, (*path, name))


COMMANDS = {" ".join(path): command for path, command in commands()}
LEAVES = {path: each for path, each in COMMANDS.items() if not isinstance(each, click.Group)}


def exit_codes(kind: type[errors.BuildIdFsError] = errors.BuildIdFsError) -> dict[str, int]:
    """The code of every class of the tree."""
    codes = {kind.__name__: kind.exit_code}
    for each in kind.__subclasses__():
        codes |= exit_codes(each)
    return codes


def settings(kind: type[msgspec.Struct] = config.Settings, path: str = "") -> dict[str, str]:
    """Every key of the configuration, ``section.key``, and its section."""
    keys = {}
    for field in msgspec.structs.fields(kind):
        name = f"{path}{field.encode_name}"
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            keys |= settings(field.type, f"{name}.")
        else:
            keys[name] = path.rstrip(".")
    return keys


def test_there_are_pages_and_commands() -> None:
    assert [path.name for path in PAGES] == [
        "buildidfs-capture.1", "buildidfs-fleet.1", "buildidfs-json.5", "buildidfs-keep.1",
        "buildidfs-lookup.1", "buildidfs-mount.7", "buildidfs-store.5", "buildidfs.1",
        "buildidfs.toml.5",
    ]  # fmt: skip
    assert {"scan proc", "scan tree", "mount", "unmount", "list", "show", "get", "stats"} <= set(
        LEAVES
    )


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_page_formats_without_a_warning(path: Path) -> None:
    done = formatted(path)
    assert (done.rc, done.err) == (0, "")
    assert "SEE ALSO" in done.out


def test_a_broken_page_would_be_noticed(tmp_path: Path) -> None:
    broken = tmp_path / "broken.1"
    broken.write_text((ROOT / "man/buildidfs.1").read_text() + ".Nosuchmacro\n")
    assert "Nosuchmacro" in formatted(broken).err


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_references_between_our_pages_lead_somewhere(path: Path) -> None:
    ours = re.findall(r"\b(buildidfs[\w.-]*)\((\d)\)", page(path.name))
    assert ours
    for name, section in ours:
        assert (ROOT / "man" / f"{name}.{section}").exists(), f"{name}({section})"


@pytest.mark.parametrize("path", LEAVES)
def test_command_is_in_the_page(path: str) -> None:
    synopsis = page("buildidfs.1").partition("SYNOPSIS")[2].partition("DESCRIPTION")[0]
    used = [line for line in synopsis.split("buildidfs ") if line.startswith(f"{path} ")]
    assert len(used) == 1, synopsis
    assert has_table(LEAVES[path]) == ("TABLE-OPTION" in used[0])
    for parameter in own_parameters(LEAVES[path]):
        if not is_table_option(parameter, LEAVES[path]):
            assert any(text in used[0] for text in _spellings(parameter)), parameter.name


def own_parameters(command: click.Command) -> list[click.Parameter]:
    """The parameters without the global options, which each command takes."""
    return [each for each in command.params if not getattr(each, "hidden", False)]


TABLE_OPTIONS = {"--sort", "--limit", "--format", "--no-trunc"}


def has_table(command: click.Command) -> bool:
    return {option for each in command.params for option in each.opts} >= TABLE_OPTIONS


def is_table_option(parameter: click.Parameter, command: click.Command) -> bool:
    """Return True if the section TABLES of the page describes a parameter of a command."""
    return has_table(command) and TABLE_OPTIONS.issuperset(parameter.opts)


def test_options_of_tables_are_in_the_page() -> None:
    section = page("buildidfs.1").partition(" TABLES ")[2].partition(" OUTPUT ")[0]
    assert any(map(has_table, LEAVES.values()))
    for option in TABLE_OPTIONS:
        assert f"{option} " in section


@functools.cache
def command_texts() -> dict[str, str]:
    """What the page says of each command, and under the empty name of the program itself."""
    text = formatted(ROOT / "man/buildidfs.1").out
    found = {"": text.partition("\nDESCRIPTION\n")[2].partition("\nCOMMANDS\n")[0]}
    for family in FAMILIES:
        text = formatted(family).out
        described = text.partition("\nDESCRIPTION\n")[2].partition("\nSEE ALSO\n")[0]
        # the items of the list of commands are text of a section, what belongs to them is not
        for item in re.split(rf"^{indent(text)}(?=\S)", described, flags=re.MULTILINE):
            for path in LEAVES:
                if re.match(rf"{re.escape(path)}(?: [A-Z]|\s*$| {{2,}})", item, re.MULTILINE):
                    found[path] = item
    return found


def test_each_command_has_a_family() -> None:
    families = page("buildidfs.1").partition(" COMMANDS ")[2].partition(" TABLES ")[0]
    assert [name for name in cli.commands if not re.search(rf"\b{name}\b[,.]", families)] == []
    named = re.findall(r"buildidfs-\w+\(1\)", families)
    assert sorted(named) == [f"{path.stem}(1)" for path in FAMILIES]


@pytest.mark.parametrize("path", ["", *LEAVES])
def test_options_are_in_the_page(path: str) -> None:
    text = command_texts()[path]
    for option in own_parameters(COMMANDS[path]):
        if isinstance(option, click.Option) and not is_table_option(option, COMMANDS[path]):
            for spelling in (*option.opts, *option.secondary_opts):
                assert re.search(rf"(?<![\w-]){re.escape(spelling)}(?![\w-])", text), spelling


@pytest.mark.parametrize("path", ["", *LEAVES])
def test_page_has_no_option_that_is_none(path: str) -> None:
    params = COMMANDS[path].params
    options = {each for param in params for each in (*param.opts, *param.secondary_opts)}
    options |= {"--help", "-h", *(each for param in cli.params for each in param.opts)}
    items = r"^ +(--?[a-z][\w-]*)(?:, (--?[a-z][\w-]*))?"
    shown = {
        each for pair in re.findall(items, command_texts()[path], re.MULTILINE) for each in pair
    }
    assert shown - {""} <= options


def _spellings(parameter: click.Parameter) -> list[str]:
    """How a synopsis may show a parameter."""
    if isinstance(parameter, click.Argument):
        return [(parameter.metavar or "").removesuffix("...").removesuffix("_")]
    return list(parameter.opts)


@pytest.mark.parametrize("words", [[], ["scan"]])
def test_list_of_commands_cuts_no_sentence(words: list[str]) -> None:
    done = CliRunner().invoke(cli, [*words, "--help"], terminal_width=80)
    assert "..." not in done.output.partition("EXAMPLES:")[0].replace("[ARGS]...", "")


@pytest.mark.parametrize("path", COMMANDS)
def test_help_has_examples_and_exit_status(path: str) -> None:
    done = CliRunner().invoke(cli, [*path.split(), "--help"])
    assert done.exit_code == 0, done.output
    examples, _, statuses = done.output.partition("EXIT STATUS:")
    shown = re.findall(r"^ +\S", examples.partition("EXAMPLES:\n")[2], re.MULTILINE)
    assert 1 <= len(shown) <= (2 if path else 3), "the manual pages have room for others"
    assert re.search(r"^ +0 +\S", statuses, re.MULTILINE), done.output


def examples() -> Iterator[tuple[str, str]]:
    """Every command line of ours that a help text or document shows, and where it is from."""
    for path, command in COMMANDS.items():
        yield from ((line, path or "help") for line in (command.epilog or "").splitlines())
    for page_path in PAGES:
        for display in re.findall(r"^\.Bd -literal.*?^\.Ed", page_path.read_text(), re.M | re.S):
            yield from ((line, page_path.name) for line in display.splitlines())
    for document in DOCUMENTS:
        blocks = re.findall(
            r"^```sh\n(.*?)^```$|`(buildidfs [^`]+)`|^    # (buildidfs [^\n]+)$",
            document.read_text(),
            re.M | re.S,
        )
        yield from ((line, document.name) for pair in blocks for line in "".join(pair).splitlines())


EXAMPLES = [
    (line.strip(), where) for line, where in examples() if line.strip().startswith("buildidfs ")
]


@pytest.mark.parametrize(("line", "where"), EXAMPLES)
def test_example_is_a_command_there_is(line: str, where: str) -> None:
    words = shlex.split(re.split(r" (?:[|>#]|&&)", line)[0], comments=True)[1:]
    while words and words[0] in {"-q", "-v", "-vv"}:
        del words[0]
    if words and words[0].startswith("-"):
        assert words in (["--version"], ["--help"]), "a test must not run other commands"
        assert CliRunner().invoke(cli, words).exit_code == 0
        return
    for path, command in LEAVES.items():
        if words[: len(path.split())] == path.split():
            rest = words[len(path.split()) :]
            # A mention in running text (`buildidfs unmount`) is no example of arguments.
            if rest or "md" not in where:
                assert command.make_context(path, rest)
            return
    pytest.fail(f"{where}: no such command: {line}")


@pytest.mark.parametrize(("name", "code"), exit_codes().items())
def test_exit_code_is_in_the_page(name: str, code: int) -> None:
    statuses = page("buildidfs.1").partition(" EXIT STATUS ")[2].partition(" EXAMPLES ")[0]
    assert re.search(rf"(?:^| ){code} [A-Z]", statuses), f"{name}: {code}"


def test_exit_codes_that_commands_name_exist() -> None:
    known = {0, errors.DEGRADED, errors.LOSING, *exit_codes().values()}
    for path, command in COMMANDS.items():
        statuses = (command.epilog or "").partition("EXIT STATUS:")[2]
        named = {int(code) for code in re.findall(r"(?:^ +|; )(\d+) ", statuses, re.MULTILINE)}
        assert named, path
        assert named <= known, path


def test_environment_variables_are_in_the_page() -> None:
    sources = [path.read_text() for path in (ROOT / "buildidfs/cli").glob("*.py")]
    lines = [line for text in sources for line in text.splitlines() if "env" in line]
    variables = set(re.findall(r'"([A-Z]+_[A-Z_]+)"', "\n".join(lines)))
    assert {"BUILDIDFS_STORE", "XDG_DATA_HOME"} <= variables
    section = page("buildidfs.1").partition(" ENVIRONMENT ")[2].partition(" FILES ")[0]
    assert [name for name in variables if name not in section] == []


@pytest.mark.parametrize(("key", "section"), settings().items())
def test_setting_is_in_the_page(key: str, section: str) -> None:
    text = page("buildidfs.toml.5").partition(f" [{section}] ")[2]
    assert re.search(rf"(?:^| ){re.escape(key.removeprefix(f'{section}.'))} = ", text), key


def test_settings_of_the_page_and_the_example_are_accepted() -> None:
    shown = page_literal("buildidfs.toml.5", "EXAMPLES")
    assert config.parse(shown, "the page") != config.Settings()
    example = (ROOT / "examples/buildidfs.toml").read_text()
    assert config.parse(example, "the example") == config.Settings()
    # The lines that are commented out are settings as well, and all that there are.
    active = re.sub(r"^#(?=[\[a-z])", "", example, flags=re.MULTILINE)
    config.parse(active, "the example, all of it")
    for key in settings():
        assert re.search(rf"^#?{re.escape(key.partition('.')[2])} = ", example, re.MULTILINE), key


def page_literal(name: str, section: str) -> str:
    """The literal displays of a section of a page's source."""
    source = (ROOT / "man" / name).read_text().partition(f".Sh {section}\n")[2]
    source = source.partition("\n.Sh ")[0]
    found = re.findall(r"^\.Bd -literal.*?\n(.*?)^\.Ed", source, re.MULTILINE | re.DOTALL)
    assert found
    return "\n".join(found).replace("\\e", "\\")


def test_format_is_in_the_page() -> None:
    text = page("buildidfs-store.5")
    assert f"buildidfs store {schema.FORMAT_VERSION}" in text
    assert re.search(rf" VERSIONS .* {schema.FORMAT_VERSION} ", text)
    index = text.partition(" THE INDEX ")[2].partition(" VERSIONS ")[0]
    listed, _, explained = index.partition(" meta ")[2].partition(" meta ")
    for table in schema.TABLES[1:]:
        assert re.search(rf"\b{table}\b", listed), table
        assert re.search(rf"\b{table}\b", explained), table
    limits = (schema.MAX_ORIGINS, schema.MAX_PATHS, schema.MAX_DWZ_NAME, schema.MAX_JOURNAL)
    for number in limits:
        assert str(number) in explained


def test_names_in_the_mount_are_in_the_page() -> None:
    text = page("buildidfs-mount.7")
    browsed = (b"by-path", b"by-name", b"containers/NAME/root", b"missing/ID", b"user.sha256")
    known = (*names.KIND_OF, names.PATH, b".build-id", b".dwz", b"usr/lib/debug", *browsed)
    for name in known:
        assert re.search(rf"(?<![\w-]){re.escape(name.decode())}(?![\w-])", text), name


def test_mount_options_are_in_the_page(tmp_path: Path) -> None:
    text = page("buildidfs-mount.7").partition(" OPTIONS ")[2].partition(" NOTES ")[0]
    shown = set(re.findall(r"\b([a-z]+_[a-z_]+|loop|ro|no[a-z]+)\b(?==|,| [A-Z])", text))
    fields = {field.name for field in msgspec.structs.fields(mount_options.MountOptions)}
    fields = {
        name.replace("_kib", "_kb")
        for name in fields - {"store", "mountpoint", "bundle", "settings"}
    }
    assert fields <= shown
    values = {"loop": "plain", "gdb_scripts": "keep", "read_ahead_kb": "128"}
    for name in shown:
        option = f"{name}={values[name]}" if name in values else name
        mount_options.parse(tmp_path, tmp_path, [option])


def test_errors_docstring_has_the_codes() -> None:
    tree = inspect.getdoc(errors) or ""
    for name, code in exit_codes().items():
        assert re.search(rf"\b{name} +{code} ", tree), name


def test_links_between_documents_lead_somewhere() -> None:
    links = 0
    for path in DOCUMENTS:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)[^)]*\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name}: {target}"
            links += 1
    assert links > 10


def anchors(path: Path) -> set[str]:
    """The anchors that a forge gives to the headings of a document."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}


def test_links_lead_to_headings() -> None:
    links = 0
    for path in DOCUMENTS:
        text = " ".join(path.read_text().split())
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)", text):
            assert anchor in anchors(path.parent / target if target else path), (path.name, anchor)
            links += 1
    assert links > 20


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_modules_that_a_document_names_exist(path: Path) -> None:
    layers = "|".join(each.name for each in (ROOT / "buildidfs").iterdir() if each.is_dir())
    named = re.findall(rf"`((?:{layers})/[a-z0-9_/]*)(?:\.py)?`", path.read_text())
    package = ROOT / "buildidfs"
    missing = [each for each in named if not (package / f"{each}.py").exists()]
    assert [each for each in missing if not (package / each).is_dir()] == []
    assert named or path.name not in {"ARCHITECTURE.md", "kernel-facts.md"}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_lines_of_a_document_are_short(path: Path) -> None:
    lines = enumerate(path.read_text().splitlines(), 1)
    assert [(number, line) for number, line in lines if len(line) > 100] == []


@pytest.mark.parametrize(
    ("name", "most"), [("README.md", 13_000), ("SECURITY.md", 20_000), ("ARCHITECTURE.md", 28_000)]
)
def test_page_that_everybody_reads_is_short(name: str, most: int) -> None:
    assert len((ROOT / name).read_bytes()) <= most, "move details to a page in docs"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_manual_page_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 1_200


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_document_names_a_place_of_its_author(path: Path) -> None:
    # What is written for others names places that every system has, or that we make.
    common = {"app", "bin", "buildid", "dev", "etc", "lib", "mnt", "opt", "proc", "run", "srv"}
    common |= {"efi", "nix"}  # on systems with EFI, and on NixOS
    common |= {"symbolicate", "source", "asm", "sys", "tmp", "usr", "var"}
    common |= {"api", "compare", "container", "id", "search"}  # of the URLs of `serve`
    named = re.findall(r"(?<![\w.~*$(){}\]\">/-])/([a-zA-Z]\w*)(/[\w.-]*)", path.read_text())
    assert [f"/{first}{rest}" for first, rest in named if first not in common] == []
    # This checkout may be anywhere, also where the end of another path looks the same.
    assert not re.search(rf"(?<![\w.~*$(){{}}-]){re.escape(str(ROOT))}(?![\w-])", path.read_text())
