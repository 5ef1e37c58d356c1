# SPDX-License-Identifier: Apache-2.0
"""Groups of commands: loaded when called, listed by purpose, with global options anywhere.

A command also takes the global options after its name, unless it has an option of the same
spelling. For an unknown command the error suggests a similar one, also for the names of other
programs' commands.
"""

from __future__ import annotations

import copy
import importlib
import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import click

from buildidfs import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class _Directory(click.types.StringParamType):
    """A directory that has a name."""

    name = "directory"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name. An empty one is most often a variable of a script without a value."""
        return value or self.fail("the name of the directory is empty")


_STORE_HELP: Final = (
    "The directory of the store.  [default: /var/lib/buildidfs as root, else"
    " $XDG_DATA_HOME/buildidfs]"
)
_CONFIG_HELP: Final = (
    "Configuration file, see buildidfs.toml(5).  [default: /etc/buildidfs.toml, or"
    " $XDG_CONFIG_HOME/buildidfs.toml when not root]"
)
_HOSTNAME_HELP: Final = (
    "The name of this machine in captures.  [default: its own name; in a container"
    " $NODE_NAME, or the name of the host]"
)


def _form_log(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    """Choose the form of log lines. The lines have the name of the command."""
    if value is not None:
        from buildidfs import log

        log.setup(log.verbosity(), journald="JOURNAL_STREAM" in os.environ, form=value)
    # A command that does not log has not imported it.
    if ctx.parent is not None and (module := sys.modules.get("buildidfs.log")) is not None:
        module.rename(ctx.info_name)


GLOBAL_OPTIONS: Final = (
    click.Option(
        ["--store"], metavar="DIR", envvar="BUILDIDFS_STORE", help=_STORE_HELP, type=_Directory()
    ),
    click.Option(["--config"], metavar="FILE", help=_CONFIG_HELP),
    click.Option(["--hostname"], metavar="NAME", help=_HOSTNAME_HELP),
    click.Option(["-v", "--verbose"], count=True, help="Log each step; -vv logs everything."),
    click.Option(["-q", "--quiet"], count=True, help="Print errors only."),
    click.Option(
        ["--log-format"],
        type=click.Choice(["text", "json"]),
        help="The form of log lines: text, or one JSON object a line.  [default: text]",
        expose_value=False,
        callback=_form_log,
    ),
)
"""The options of the program. They may precede or follow the command."""

_KNOWN_ELSEWHERE: Final = {
    "cat": "get",
    "config-show": "config",
    "delete": "remove",
    "export": "bundle",
    "find": "which",
    "fsck": "check",
    "info": "show",
    "inspect": "show",
    "kill": "down",
    "log": "journal",
    "logs": "journal",
    "ls": "list",
    "metrics": "stats",
    "ps": "where",
    "rm": "remove",
    "run": "up",
    "start": "up",
    "stop": "down",
    "umount": "unmount",
    "verify": "check",
}


class _Context(click.Context):
    """A context that the parser's errors refer to, so that they name the help of the command."""

    @contextmanager
    def scope(self, cleanup: bool = True) -> Iterator[click.Context]:
        """Do as `click.Context.scope`; click parses the arguments in it."""
        with super().scope(cleanup) as context:
            try:
                yield context
            except click.UsageError as error:
                error.ctx = error.ctx or self
                raise


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called or listed.

    ``lazy`` maps the heading of each section of the help text to the names of its commands and
    ``module:attribute`` below ``buildidfs.cli``.
    """

    def __init__(
        self, *args: Any, lazy: Mapping[str, Mapping[str, str]] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.sections = lazy or {}
        self._lazy = {
            name: where for each in self.sections.values() for name, where in each.items()
        }

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self._lazy, *self.commands]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        target = self._lazy.get(cmd_name)
        if target is None:
            command = super().get_command(ctx, cmd_name)
        else:
            module, attribute = target.split(":")
            command = getattr(importlib.import_module(f"buildidfs.cli.{module}"), attribute)
        if command is not None:
            command.context_class = _Context
            _take_global_options(command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] == "help" and "help" not in self._lazy:
            if not args[1:]:
                click.echo(ctx.get_help())
                ctx.exit()
            args = [*args[1:], "--help"]
        name = args[0]
        is_option = name.startswith("-")
        if not ctx.resilient_parsing and not is_option and self.get_command(ctx, name) is None:
            raise click.UsageError(f"No such command {name!r}.{self._suggested(ctx, name)}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        names = {"Commands": self.list_commands(ctx)} if not self.sections else self.sections
        width = max(map(len, self.list_commands(ctx)), default=0)
        for heading, section in names.items():
            commands = [(name, self.get_command(ctx, name)) for name in section]
            limit = formatter.width - 6 - width
            rows = [
                (name.ljust(width), command.get_short_help_str(limit))
                for name, command in commands
                if command is not None
            ]
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)

    def _suggested(self, ctx: click.Context, name: str) -> str:
        """Return a question with the most similar command, or an empty text."""
        from difflib import get_close_matches

        spellings = dict(_spellings(self, ctx))
        meant = _KNOWN_ELSEWHERE.get(name.lower())
        if meant not in spellings.values():
            found = get_close_matches(name.lower(), spellings, 1)
            meant = spellings[found[0]] if found else None
        return "" if meant is None else f" Did you mean {meant!r}?"


def _spellings(group: click.Group, ctx: click.Context) -> Iterator[tuple[str, str]]:
    """Yield the possible spellings of each command, and its name."""
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        if isinstance(command, click.Group):
            for below in command.list_commands(ctx):
                yield below, f"{name} {below}"
        yield name, name


def _take_global_options(command: click.Command) -> None:
    """Let a command take the global options that are not options of its own."""
    taken = {spelling for each in command.params for spelling in each.opts}
    for option in GLOBAL_OPTIONS:
        if taken.isdisjoint(option.opts):
            late = copy.copy(option)
            late.hidden, late.expose_value, late.envvar = True, False, None
            late.callback = option.callback or _override
            command.params.append(late)


def _override(ctx: click.Context, param: click.Parameter, value: str | int | None) -> None:
    """Apply a global option that follows the command."""
    if value is None or value == 0 or param.name is None:
        return
    root = ctx.find_root()
    root.params[param.name] = value  # for completion
    if root.obj is not None:
        root.obj.override(param.name, value)


def _commit() -> str:
    """Return the commit of which this program was built; empty if it is unknown.

    It is in the file COMMIT of a package. For a checkout it is asked of git, with a plus sign if
    files have changed.
    """
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    try:
        with open(os.path.join(package, "COMMIT"), encoding="ascii") as file:
            return file.read().strip()
    except FileNotFoundError:
        checkout = os.path.dirname(package)
    if not os.path.exists(os.path.join(checkout, ".git")):
        return ""
    import subprocess

    words = ["describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(
            ["git", "-C", checkout, *words], capture_output=True, text=True, check=False
        )
    except OSError:  # there is no git
        return ""
    return done.stdout.strip()


def version_option() -> click.Option:
    """Return the option that prints the version."""

    def show(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if value and not ctx.resilient_parsing:
            commit = _commit()
            click.echo(f"buildidfs {__version__}{f' ({commit})' if commit else ''}")
            ctx.exit()

    return click.Option(
        ["--version"], is_flag=True, expose_value=False, is_eager=True, callback=show,
        help="Show the version and exit.",
    )  # fmt: skip
