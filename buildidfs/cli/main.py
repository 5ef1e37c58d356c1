# SPDX-License-Identifier: Apache-2.0
"""The command line: argv to one command, its errors to an exit status."""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn

import click

from buildidfs import __version__
from buildidfs.cli.common import (
    CONFIG_HELP,
    HOSTNAME_HELP,
    STORE_HELP,
    LazyGroup,
    Session,
    exit_status,
)
from buildidfs.errors import BuildIdFsError, Interrupted, UsageError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


_INTERRUPTED = 128 + 2
_BROKEN_PIPE = 128 + 13
_OUTPUT = 1
_LAST = 2


@click.group(
    cls=LazyGroup,
    lazy={
        "up": "service:up",
        "down": "service:down",
        "status": "service:status",
        "scan": "scan:scan",
        "add": "files:add",
        "remove": "removal:remove",
        "watch": "watch:watch",
        "mount": "mount:mount",
        "unmount": "mount:unmount",
        "list": "list:list_",
        "containers": "containers:containers",
        "show": "show:show",
        "journal": "journal:journal",
        "which": "lookup:which",
        "where": "lookup:where",
        "symbolize": "symbolize:symbolize",
        "get": "files:get",
        "coverage": "coverage:coverage",
        "repair": "repair:repair",
        "bundle": "bundle:bundle",
        "import": "bundle:import_",
        "pin": "pin:pin",
        "unpin": "pin:unpin",
        "prune": "removal:prune",
        "gc": "removal:gc",
        "compress": "removal:compress",
        "stats": "stats:stats",
        "check": "check:check",
        "doctor": "doctor:doctor",
    },
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=exit_status(
        ["buildidfs scan proc", "buildidfs mount /buildid", "ls /buildid"],
        {
            1: "a fault of the program itself",
            2: "wrong usage",
            3: "finished, but some inputs could not be read",
            10: "store error; 11 no store, 12 locked, 13 unknown format, 14 disk full",
            20: "bytes or rows are not what they were when written",
            30: "nothing known, or kept, under that build ID",
            40: "mounting, serving or unmounting failed",
            60: "a privilege is missing; the message names it",
        },
    ),
)
@click.option("--store", metavar="DIR", envvar="BUILDIDFS_STORE", help=STORE_HELP)
@click.option("--config", metavar="FILE", help=CONFIG_HELP)
@click.option("--hostname", metavar="NAME", help=HOSTNAME_HELP)
@click.option("-v", "--verbose", count=True, help="Say what is being done; -vv for everything.")
@click.option("-q", "--quiet", count=True, help="Show errors only.")
@click.version_option(__version__, prog_name="buildidfs", message="%(prog)s %(version)s")
@click.pass_context
def cli(
    ctx: click.Context,
    store: str | None,
    config: str | None,
    hostname: str | None,
    verbose: int,
    quiet: int,
) -> None:
    """Every binary a host ever ran, readable by build ID, after the container is gone."""
    ctx.obj = Session(store, config, verbose - quiet, hostname)


def run() -> NoReturn:
    """Run the command line of this process, and end the process.

    The interpreter would take a seventh of the time of a short command to free what the kernel
    frees at once. So the process ends without that, unless another thread has to end first.
    """
    status = main()
    if sys.flags.dev_mode or threading.active_count() > 1:
        raise SystemExit(status)
    atexit._run_exitfuncs()
    with contextlib.suppress(ReaderGone, UsageError):  # of a command that failed in the middle
        sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status; never lets a traceback out.

    The one place where errors become exit codes (errors.py). With -vv the traceback of an
    unknown error is shown as well, for a bug report.
    """
    # A command is over before there is garbage worth looking for; importing alone sets off dozens
    # of collections.
    gc.set_threshold(20_000, 20, 20)
    try:
        _prepare_streams()
        result = cli.main(args=argv, prog_name="buildidfs", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.ClickException as error:
        return _report_usage(error)
    except (click.Abort, KeyboardInterrupt) as error:
        if isinstance(error.__cause__, Interrupted):  # click raises Abort from it
            click.echo(f"buildidfs: interrupted: {error.__cause__}", err=True)
        return _INTERRUPTED
    except ReaderGone:
        return _BROKEN_PIPE
    except Exception as error:
        return _report(error)


def _report_usage(error: click.ClickException) -> int:
    """One line on standard error for what click does not understand; the help if all is missing."""
    if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):
        error.show()
        return error.exit_code
    text = " ".join(error.format_message().split()).removesuffix(".")
    context = error.ctx if isinstance(error, click.UsageError) else None
    command = context.command_path if context is not None else "buildidfs"
    if isinstance(error, click.NoSuchOption) and error.option_name in _global_options():
        text, command = f"{error.option_name} stands before the command", "buildidfs"
    click.echo(f"buildidfs: {text[:1].lower()}{text[1:]} (see {command} --help)", err=True)
    return error.exit_code


def _global_options() -> set[str]:
    return {name for option in cli.params for name in option.opts}


def _report(error: Exception) -> int:
    """One line on standard error for an exception, and its exit code."""
    known = next(_known(error), None)
    if known is not None:
        from buildidfs.cli.output import one_line

        click.echo(f"buildidfs: {one_line(str(known))}", err=True)
        return known.exit_code
    import logging

    logging.getLogger(__name__).debug("where the internal error comes from:", exc_info=error)
    text = " ".join(str(error).split())
    click.echo(
        f"buildidfs: internal error: {type(error).__name__}: {text}"
        " (a bug: please report it with the output of the same command with -vv)",
        err=True,
    )
    return BuildIdFsError.exit_code


def _known(error: BaseException) -> Iterator[BuildIdFsError]:
    """The errors of ours in an exception, looking into exception groups."""
    if isinstance(error, BuildIdFsError):
        yield error
    elif isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _known(inner)


class ReaderGone(Exception):
    """The reader of the output (head, less) is gone. No OSError: click would handle that."""


class _Output(io.FileIO):
    """Standard output. Raises `UsageError` and `ReaderGone`, and is silent after that."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            # Python would complain again when it flushes what is left.
            os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), _OUTPUT)
            if isinstance(error, BrokenPipeError):
                raise ReaderGone from error
            raise UsageError(f"cannot write the output: {error.strerror}") from error


def _prepare_streams() -> None:
    """Make the standard streams of this process safe to use."""
    if None in (sys.stdin, sys.stdout, sys.stderr):
        # The next files to be opened, those of the store, would become the streams.
        while (fd := os.open(os.devnull, os.O_RDONLY)) <= _LAST:
            pass
        os.close(fd)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stdout is sys.__stdout__:  # else a caller has redirected the output
        terminal = os.isatty(_OUTPUT)
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(_Output(_OUTPUT, "wb", closefd=False)),
            encoding=sys.stdout.encoding if sys.stdout is not None else "utf-8",
            errors="backslashreplace",
            line_buffering=terminal,
        )
