# SPDX-License-Identifier: Apache-2.0
"""``buildidfs config``: the settings in effect, with the source of each."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click
import msgspec

from buildidfs.cli import table
from buildidfs.cli.common import Session, exit_status
from buildidfs.cli.output import age, size
from buildidfs.cli.table import Cell, Column

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_WITHOUT: Final = {
    "retention.max-size": "no limit",
    "retention.keep-free": "5%, at most 4 GiB",
    "retention.max-age": "no limit",
    "retention.compress-after": "never",
    "up.mountpoint": "/buildid",
    "watch.exclude": "nothing",
    "watch.metrics": "off",
    "serve.listen": "off",
    "config": "no file",
    "upstream.timeout": "10s",
}
"""The meaning of an unset key."""
_UNITS: Final[dict[str, Callable[[Any], str]]] = {
    "watch.pin-seconds": age,
    "watch.pin-bytes": size,
    "retention.max-size": size,
    "retention.keep-free": size,
    "retention.max-age": age,
    "retention.min-age": age,
    "retention.compress-after": age,
    "serve.rate": lambda count: f"{count:g} requests a second" if count else "no limit",
    "serve.timeout": age,
    "check.scrub-rate": lambda count: f"{size(count)} a second" if count else "off",
    "remote.refresh": age,
    "remote.rate": lambda count: f"{size(count)} a second" if count else "no limit",
    "remote.keep": age,
    "upstream.timeout": age,
    "upstream.wait": age,
    "upstream.max-size": size,
    "upstream.remember-absent": age,
}
"""Functions that show the number of a setting to a person. A text is shown as it is in the file."""


_UPSTREAM: Final = {
    "upstream.urls": "DEBUGINFOD_URLS",
    "upstream.timeout": "DEBUGINFOD_TIMEOUT",
    "upstream.headers-file": "DEBUGINFOD_HEADERS_FILE",
}
"""The variables that provide the same setting. Servers in a variable are added to those of the
file; for other settings the file takes precedence.
"""


class _Value(NamedTuple):
    full: str
    person: str


class _Row(NamedTuple):
    key: str
    value: Any
    source: str


def _in_full(row: _Row) -> str:
    """Return a value with all its digits."""
    value = row.value
    if value is None or value in ("", []):
        return _WITHOUT.get(row.key, "none")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    if all(isinstance(each, str) for each in value):
        return ", ".join(value) or _WITHOUT.get(row.key, "none")
    return msgspec.json.encode(value).decode()


def _for_person(row: _Row) -> str:
    if row.key in _UNITS and not isinstance(row.value, str | None):
        return _UNITS[row.key](row.value)
    return _in_full(row)


_SOURCE: Final = Cell(
    table.TEXT.person,
    table.TEXT.full,
    colour=lambda source: None if source == "default" else "green",
)
_VALUE: Final = Cell(
    lambda value: table.LABEL.person(value.person),
    lambda value: table.LABEL.full(value.full),
    cut=True,
)
_COLUMNS: Final[tuple[Column[_Row], ...]] = (
    Column("key", "KEY", lambda row: row.key, table.TEXT),
    Column("value", "VALUE", lambda row: _Value(_in_full(row), _for_person(row)), _VALUE),
    Column("source", "FROM", lambda row: row.source, _SOURCE),
)


@click.command(
    "config",
    short_help="Show the settings in effect, and their sources.",
    epilog=exit_status(
        ["buildidfs config", "buildidfs config --json | jq 'select(.source != \"default\")'"],
        {2: "the configuration file cannot be read, or makes no sense"},
    ),
)
@table.options(_COLUMNS)
@click.pass_context
def config(ctx: click.Context, layout: table.Layout) -> None:
    """Show each setting with its value and its source: default, file, environment, or option.

    The first rows are the configuration file and the name of this machine. Options of single
    commands, such as prune --max-size, are no settings, and take precedence there.
    """
    layout.print(_COLUMNS, _rows(ctx, ctx.obj), _Row._asdict)


def _rows(ctx: click.Context, session: Session) -> Iterator[_Row]:
    from buildidfs import config as toml
    from buildidfs.linux import machine
    from buildidfs.upstream.options import without_password

    settings, path = session.settings, session.config_path
    given = frozenset() if path is None else toml.given_keys(session.config_text, path)
    yield _Row("config", path, _of_option(ctx, "config") or "default")
    node = os.environ.get("NODE_NAME", "")
    hostname = _of_option(ctx, "hostname")
    machine.call(session.hostname or "", node)
    name = machine.host_name()
    is_node = bool(node) and name == node
    yield _Row("hostname", name, hostname or ("environment NODE_NAME" if is_node else "default"))
    for key in toml.known_keys():
        section, _, name = key.partition(".")
        value = getattr(getattr(settings, section), name.replace("-", "_"))
        source = f"file {path}" if key in given else "default"
        if key in _UPSTREAM and (text := os.environ.get(_UPSTREAM[key], "")):
            value, source = _with_environment(key, value, source, text)
        if key == "upstream.urls":
            value = [without_password(url) for url in value]
        if key == "store.path":
            value, source = session.store_path, _of_option(ctx, "store") or source
        yield _Row(key, value, source)


def _with_environment(key: str, value: Any, source: str, text: str) -> tuple[Any, str]:
    """Return a setting of ``[upstream]`` and its source, if a variable of debuginfod is set."""
    variable = f"environment {_UPSTREAM[key]}"
    if key == "upstream.urls":
        return [*value, *text.split()], f"{source}, {variable}" if value else variable
    if value:
        return value, source
    if key == "upstream.timeout":
        from buildidfs.upstream.options import seconds

        timeout = seconds(text)
        return (value, source) if timeout is None else (timeout, variable)
    return text, variable


def _of_option(ctx: click.Context, name: str) -> str:
    """Return the source of a global option that was given, before or after the command."""
    from click.core import ParameterSource

    sources = {each.get_parameter_source(name) for each in (ctx, ctx.find_root())}
    if ParameterSource.COMMANDLINE in sources:
        return f"option --{name}"
    if ParameterSource.ENVIRONMENT in sources:
        return "environment BUILDIDFS_STORE"
    return ""
