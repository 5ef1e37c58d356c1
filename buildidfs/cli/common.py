# SPDX-License-Identifier: Apache-2.0
"""Options, settings and completion that several commands share."""

from __future__ import annotations

import functools
import os
import re
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import click

from buildidfs.cli import terminal
from buildidfs.errors import BuildIdFsError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from click.shell_completion import CompletionItem

    from buildidfs.cli.output import ProgressLine
    from buildidfs.config import Settings
    from buildidfs.store import Store


_COMPLETIONS: Final = 100
_CONFIG_MAX: Final = 1 << 20
_MEANING: Final = 72
"""The number of columns for the meaning of an exit status in a help text, which has 80 columns."""
_PLAIN: Final = re.compile(r"[\w@%+:,./][\w@%+:,./-]*")
_ANYWHERE: Final = (
    "--store, --config, --hostname, -v and -q may stand here, too: see buildidfs --help"
)


NO_STORE: Final = {11: "no store at that place; 13 unknown format"}
"""The exit statuses of commands that need a store."""


def exit_status(
    examples: Sequence[str], codes: Mapping[int, str], *, of_program: bool = False
) -> str:
    """Return the end of a help text: examples, then the meanings of the exit codes."""
    lines = ["\b", "EXAMPLES:", *(f"  {line}" for line in examples), ""]
    lines += ["\b", "EXIT STATUS:", "  0   success"]
    for code, meaning in codes.items():
        first, *others = _folded(meaning)
        lines += [f"  {code:<3} {first}", *(f"      {line}" for line in others)]
    if not of_program:
        lines += ["", _ANYWHERE]
    return "\n".join(lines)


def _folded(meaning: str) -> list[str]:
    if len(meaning) <= _MEANING:
        return [meaning]
    import textwrap  # few texts need it

    return textwrap.wrap(meaning, _MEANING)


class Session:
    """One run of the command. Global options are evaluated when a command needs them."""

    def __init__(
        self, store: str | None, config: str | None, verbosity: int, hostname: str | None = None
    ) -> None:
        self.verbosity = verbosity
        self._hostname = hostname
        self._store = store
        self._config = config
        self._settings: Settings | None = None
        if verbosity != 0:
            self.start_logging()

    def override(self, name: str, value: str | int) -> None:
        """Apply a global option that follows the command."""
        if name == "store":
            self._store = str(value)
        elif name == "config":
            self._config = str(value)
        elif name == "hostname":
            self._hostname = str(value)
        else:
            self.verbosity += int(value) if name == "verbose" else -int(value)
            self.start_logging()

    @property
    def is_quiet(self) -> bool:
        """True if only errors are printed."""
        return self.verbosity < 0

    def explain_empty(self, why: str) -> None:
        """Print on standard error why an answer is empty. The exit status does not change."""
        from buildidfs.cli.output import one_line

        if not self.is_quiet:
            terminal.complain(one_line(why))

    def progress(
        self, description: str, noun: str = "file"
    ) -> AbstractContextManager[ProgressLine | None]:
        """Return a line of progress if one is wanted, see `output.progress`.

        With -v there is no line: log messages show more, and would mix with it.
        """
        from buildidfs.cli.output import progress

        return progress(description, noun, quiet=self.verbosity != 0)

    def start_logging(self) -> None:
        """Set up logging; commands that never log do not import it."""
        from buildidfs import log

        log.setup(self.verbosity, journald="JOURNAL_STREAM" in os.environ)

    @property
    def settings(self) -> Settings:
        """Return the settings of the configuration file, or the defaults if there is none."""
        if self._settings is None:
            from buildidfs import config

            path = self.config_path
            self._settings = (
                config.Settings() if path is None else config.parse(self.config_text, path)
            )
        return self._settings

    @functools.cached_property
    def config_text(self) -> str:
        """The text of the configuration file; empty if there is none."""
        path = self.config_path
        if path is None:
            return ""
        from buildidfs.linux import ownership

        if self._config is not None:
            from buildidfs.capture.unresponsive.file_helper import check_readable

            check_readable(os.fsencode(path))
        try:
            text = ownership.read_own(path, _CONFIG_MAX + 1)
            if len(text) > _CONFIG_MAX:
                raise UsageError(f"configuration file {path} has more than {_CONFIG_MAX} bytes")
            return text.decode()
        except (OSError, UnicodeDecodeError) as error:
            reason = "not UTF-8 text"
            if isinstance(error, OSError):
                reason = error.strerror or str(error)
            raise UsageError(f"cannot read configuration file {path}: {reason}") from error

    @property
    def hostname(self) -> str | None:
        """Return the value of --hostname, if it was given."""
        return self._hostname

    @property
    def config_path(self) -> str | None:
        """Return the path of the configuration file; None if no file is read."""
        if self._config is not None:
            return self._config
        candidates = ["/etc/buildidfs.toml"]
        if os.geteuid() != 0:
            base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
            candidates.insert(0, os.path.join(os.path.expanduser(base), "buildidfs.toml"))
        return next((path for path in candidates if os.path.exists(path)), None)

    @functools.cached_property
    def store_path(self) -> str:
        """The store's directory: --store, $BUILDIDFS_STORE, [store] path, or the default.

        A warning is printed if other users may change the store.
        """
        path = self.unchecked_store_path()
        if not self.is_quiet:
            self._warn_of_others(path)
        return path

    def _warn_of_others(self, path: str) -> None:
        from buildidfs.linux import ownership

        try:
            weak = ownership.weak_place(path)
        except OSError:
            return  # the command reports it
        if weak:
            terminal.complain(f"warning: store {path} {weak}")

    def unchecked_store_path(self) -> str:
        """Return the directory of the store, without the warning; `doctor` has its own."""
        if self._config is not None:
            _ = self.settings  # to report its errors even if its store is not used
        if self._store:
            return self._store
        if self.config_path is not None and self.settings.store.path:
            return os.path.expanduser(self.settings.store.path)
        if os.geteuid() == 0:
            return "/var/lib/buildidfs"
        base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
        return os.path.join(os.path.expanduser(base), "buildidfs")

    def as_given(self, command: str) -> str:
        """Return a command line for copying, with ``--store`` if it was given."""
        if not self._store or self._store == os.environ.get("BUILDIDFS_STORE"):
            return command
        import shlex

        return command.replace("buildidfs ", f"buildidfs --store {shlex.quote(self._store)} ")

    def arguments(self) -> list[str]:
        """Return the global options with which another process of the program has the same
        session.
        """
        words = ["--store", os.path.abspath(self.store_path)]
        if self._hostname is not None:
            words += ["--hostname", self._hostname]
        if self._config is not None:
            words += ["--config", os.path.abspath(self._config)]
        return words + ["-v"] * self.verbosity + ["-q"] * -self.verbosity

    @contextmanager
    def capturing(self, doing: str = "Capturing") -> Iterator[tuple[Store, ProgressLine | None]]:
        """Open the store for captures, create it if it is absent, and show the progress."""
        with self.open_store(create=True) as store, self.progress(doing) as show:
            yield store, show

    def open_store(self, *, create: bool = False) -> Store:
        """Open the store for reading and writing; on a read-only filesystem for reading.

        With ``create``, which captures give, a missing store is made, and the store keeps the
        limits of ``[retention]`` from now on.
        """
        from buildidfs.linux import machine
        from buildidfs.store import Store

        machine.call(self._hostname or "", os.environ.get("NODE_NAME", ""))
        path = self.store_path
        if not create:
            return Store.open(path, read_only=not os.access(path, os.W_OK))
        from buildidfs.ingest import upkeep

        return upkeep.open_for_capture(path, self.settings)


class AnyPath(click.Path):
    """A path with completion. click does not check it.

    A check would access the filesystem, which may not answer. It would also refuse unreadable
    files, which the command should report itself.
    """

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> str:
        return os.fspath(value)


class _OfStore(click.types.StringParamType):
    """An argument with completions from the store. The store is opened for reading only."""

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the first completions; none if there is no store that can be read.

        A name that a shell would have to quote is left out, because a container may have chosen it,
        and not all shells quote completions.
        """
        from itertools import islice

        from click.shell_completion import CompletionItem

        from buildidfs.store import Store

        globals_ = ctx.find_root().params
        session = Session(globals_.get("store"), globals_.get("config"), -1)
        try:
            with Store.open(session.store_path, read_only=True) as store:
                plain = filter(_PLAIN.fullmatch, self.candidates(store, incomplete))
                return [CompletionItem(text) for text in islice(plain, _COMPLETIONS)]
        except (BuildIdFsError, ValueError):
            return []

    def candidates(self, store: Store, incomplete: str) -> Iterator[str]:
        """Yield the completions of a word."""
        raise NotImplementedError


class SeenPath(_OfStore):
    """A path at which files were seen, or a pattern of such paths."""

    name = "path"

    def candidates(self, store: Store, incomplete: str) -> Iterator[str]:
        return _seen_paths(store, os.fsencode(incomplete))


class BuildIdArgument(_OfStore):
    """A build ID, a unique prefix of a build ID in the store, or a path at which a file was
    seen.
    """

    name = "id"

    def candidates(self, store: Store, incomplete: str) -> Iterator[str]:
        if incomplete.startswith("/"):
            yield from _seen_paths(store, os.fsencode(incomplete))
            return
        digits = incomplete.lower()
        whole = bytes.fromhex(digits[: len(digits) // 2 * 2])
        for build_id, _ in store.index.build_ids_with_prefix(whole, None):
            if str(build_id).startswith(digits):
                yield str(build_id)


def _seen_paths(store: Store, incomplete: bytes) -> Iterator[str]:
    """Yield matching files and directories, a directory with a slash.

    A directory that is the only match is replaced by its content, because shells append a blank to
    a unique completion.
    """
    from itertools import islice

    directory, slash, start = incomplete.rpartition(b"/")
    number = store.paths.number(filter(None, directory.split(b"/"))) if slash else None
    while number is not None:
        fitting = (each for each in store.paths.children(number) if each[0].startswith(start))
        found = list(islice(fitting, _COMPLETIONS))
        is_directory = [next(store.paths.children(below), None) is not None for _, below in found]
        if is_directory == [True] and not any(True for _ in store.paths.ids(found[0][1])):
            directory, number, start = directory + b"/" + found[0][0], found[0][1], b""
            continue
        for (name, _), slashed in zip(found, is_directory, strict=True):
            yield os.fsdecode(directory + b"/" + name + b"/" * slashed)
        return


def _names(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    """Return the names in a list separated by commas."""
    if value is None:
        return None
    from buildidfs.model import NamespaceSet

    names = tuple(dict.fromkeys(part.strip() for part in value.split(",")))
    known = NamespaceSet.__struct_fields__
    for name in names:
        if name not in known:
            raise click.BadParameter(
                f"no such namespace: {name!r}; there are {', '.join(known)}", ctx, param
            )
    return names


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete the name after the last comma."""
    from buildidfs.model import NamespaceSet

    before, comma, start = incomplete.rpartition(",")
    return [
        before + comma + name for name in NamespaceSet.__struct_fields__ if name.startswith(start)
    ]


namespaces_option = click.option(
    "--namespaces",
    "names",
    metavar="LIST",
    callback=_names,
    shell_complete=_complete,
    help="A process is in a container if none of these namespaces is the host's (pid,uts).",
)


def json_option(
    help_: str = "Print one JSON object.",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that gives a command the option ``--json``, and the argument ``json_``."""
    return click.option("--json", "json_", is_flag=True, help=help_)


class ContainerArgument(_OfStore):
    """A container: its label, the beginning of its ID, or its name."""

    name = "container"

    def candidates(self, store: Store, incomplete: str) -> Iterator[str]:
        every = [(each.called.shown, each.label) for each in store.containers.every()]
        found = sorted({text for both in every for text in both if text})
        return (text for text in found if text.startswith(incomplete))


def container_option(
    help_: str = "Only files seen in this container: its name, pod, label, or the start of its ID.",
    *,
    multiple: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that gives a command the option ``--container``.

    The command gets the argument ``container``, or with ``multiple`` the argument ``containers``.
    """
    return click.option(
        "--container",
        *(("containers",) if multiple else ()),
        metavar="NAME",
        type=ContainerArgument(),
        multiple=multiple,
        help=help_,
    )


_SECOND: Final = 1_000_000_000
_AGO: Final = re.compile(r"(\d{1,9})([smhdw])")
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_EPOCH: Final = re.compile(r"@(\d{1,10})(?:\.(\d{1,9}))?")


def point_in_time(text: str, now_ns: int) -> int:
    """Parse a point in time; return nanoseconds of Unix time.

    The text is an age (``90s``, ``10m``, ``2h``, ``3d``, ``1w``), a date with or without a time
    (ISO 8601; local unless it has an offset), or ``@`` and seconds of Unix time. Raises ValueError.
    """
    if found := _AGO.fullmatch(text):
        return max(now_ns - int(found[1]) * _UNITS[found[2]] * _SECOND, 0)
    if found := _EPOCH.fullmatch(text):
        return int(found[1]) * _SECOND + int((found[2] or "").ljust(9, "0"))
    from datetime import datetime

    try:
        return max(int(datetime.fromisoformat(text).timestamp()) * _SECOND, 0)
    except OverflowError as error:
        raise ValueError(str(error)) from error


def _since(ctx: click.Context, param: click.Parameter, value: str | None) -> int:
    if value is None:
        return 0
    try:
        return point_in_time(value, time.time_ns())
    except ValueError:
        raise click.BadParameter(
            f"not a time: {value!r}; try 10m, 2h, 3d, 2026-11-22 or @1700000000", ctx, param
        ) from None


since_option = click.option(
    "--since",
    metavar="T",
    callback=_since,
    help="Only files seen since this time: 10m, 2h, 3d, a date.",
)
