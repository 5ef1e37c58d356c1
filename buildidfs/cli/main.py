# SPDX-License-Identifier: Apache-2.0
"""The command line: argv to one command, its errors to an exit status."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn

import click

from buildidfs.cli import terminal
from buildidfs.cli.common import Session, exit_status
from buildidfs.cli.group import GLOBAL_OPTIONS, LazyGroup, version_option
from buildidfs.errors import BuildIdFsError, Interrupted, UsageError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


_ALIKE = 0.7
_INTERRUPTED = 128 + 2
_BROKEN_PIPE = 128 + 13
_OUTPUT = 1
_LAST = 2
_PLAIN = {
    "is not a valid integer range": "is not a whole number",
    "is not a valid float range": "is not a number",
    " is not in the range x>=": " is less than ",
}
"""Texts of click, and the clearer texts that replace them."""


@click.group(
    cls=LazyGroup,
    lazy={
        "Capture": {
            "up": "service:up",
            "down": "service:down",
            "watch": "watch:watch",
            "scan": "scan:scan",
            "add": "contents:add",
            "fetch": "fleet:fetch",
        },
        "Look up": {
            "mount": "serve:mount",
            "unmount": "serve:unmount",
            "serve": "serve:serve",
            "list": "contents:list_",
            "containers": "contents:containers",
            "show": "lookup:show",
            "get": "contents:get",
            "which": "lookup:which",
            "where": "lookup:where",
            "journal": "history:journal",
            "symbolize": "symbolize:symbolize",
        },
        "Profiles and core files": {
            "coverage": "profile:coverage",
            "why": "profile:why",
            "repair": "profile:repair",
            "jit": "watch:jit",
            "bundle": "bundle:bundle",
            "import": "bundle:import_",
        },
        "Fleet": {"push": "fleet:push", "fleet": "fleet:fleet"},
        "Keep and remove": {
            "pin": "retention:pin",
            "unpin": "retention:unpin",
            "prune": "retention:prune",
            "remove": "retention:remove",
            "compress": "retention:compress",
            "gc": "retention:gc",
        },
        "Health": {
            "status": "service:status",
            "top": "service:top",
            "stats": "history:stats",
            "report": "history:report",
            "doctor": "health:doctor",
            "config": "setup:config",
            "setup": "setup:setup",
            "check": "health:check",
        },
    },
    params=[*GLOBAL_OPTIONS, version_option()],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=exit_status(
        ["buildidfs scan proc", "buildidfs mount /buildid", "ls /buildid"],
        {
            1: "internal error",
            2: "wrong usage",
            3: "finished, but some inputs could not be read",
            10: "store error; 11 no store, 12 locked, 13 unknown format, 14 disk full",
            20: "bytes or rows differ from those that were written",
            30: "the build ID is unknown, or has no bytes in the store",
            40: "mounting, serving or unmounting failed",
            50: "no upstream server answered, or the bucket of the fleet did not",
            60: "a privilege is missing; the message names it",
        },
        of_program=True,
    ),
)
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

    The interpreter would take a seventh of the time of a short command to free memory, which the
    kernel frees at once. So the process ends without freeing it, unless another thread has to end
    first. Daemon threads need not end: some wait for processes that never answer.
    """
    status = main()
    if sys.flags.dev_mode or sum(not each.daemon for each in threading.enumerate()) > 1:
        raise SystemExit(status)
    atexit._run_exitfuncs()
    with contextlib.suppress(ReaderGone, UsageError):  # of a command that failed in the middle
        sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status; never raises.

    This is the one place where errors become exit codes (errors.py). With -vv the traceback of an
    unknown error is printed as well, for a bug report.
    """
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
        if isinstance(error.__cause__, Interrupted):  # click raises Abort for it
            terminal.complain(f"interrupted: {error.__cause__}")
        return _INTERRUPTED
    except ReaderGone:
        return _BROKEN_PIPE
    except Exception as error:  # the top of the program: each error becomes one line
        return _report(error)


def _report_usage(error: click.ClickException) -> int:
    """Print one line on standard error for wrong usage; the help if all arguments are missing."""
    if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):
        error.show()
        return error.exit_code
    text = " ".join(_message(error).split()).removesuffix(".")
    for words, plain in _PLAIN.items():
        text = text.replace(words, plain)
    context = error.ctx if isinstance(error, click.UsageError) else None
    command = context.command_path if context is not None else "buildidfs"
    if not text[1:2].isupper():  # FRAME is the name of an argument
        text = text[:1].lower() + text[1:]
    terminal.complain(f"{text} (see {command} --help)")
    return error.exit_code


def _message(error: click.ClickException) -> str:
    """Return the message of an error. For an unknown option it suggests at most one similar
    option.
    """
    if not isinstance(error, click.NoSuchOption):
        return error.format_message()
    from difflib import get_close_matches

    alike = get_close_matches(error.option_name, error.possibilities or (), 1, _ALIKE)
    return error.message + (f" Did you mean {alike[0]!r}?" if alike else "")


def _report(error: Exception) -> int:
    """Print one line on standard error for an exception; return its exit code."""
    known = next(_known(error), None)
    if known is not None:
        from buildidfs.cli.output import one_line

        terminal.complain(one_line(str(known)))
        return known.exit_code
    if isinstance(error, FileNotFoundError) and not _has_working_directory():
        terminal.complain("the working directory was deleted: change to another one with cd")
        return UsageError.exit_code
    import logging

    logging.getLogger(__name__).debug("where the internal error comes from:", exc_info=error)
    text = " ".join(str(error).split())
    terminal.complain(
        f"internal error: {type(error).__name__}: {text}"
        " (a bug: please report it with the output of the same command with -vv)"
    )
    return BuildIdFsError.exit_code


def _has_working_directory() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _known(error: BaseException) -> Iterator[BuildIdFsError]:
    """Yield our errors in an exception, also in exception groups."""
    if isinstance(error, BuildIdFsError):
        yield error
    elif isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _known(inner)


class ReaderGone(Exception):
    """Raised if the reader of the output (head, less) has ended.

    Not an OSError, because click would handle that.
    """


class _Output(io.FileIO):
    """Standard output. It raises `UsageError` and `ReaderGone`, and drops all output after that."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            # Python would report the error again when it flushes the rest.
            os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), _OUTPUT)
            if isinstance(error, BrokenPipeError):
                raise ReaderGone from error
            raise UsageError(f"cannot write the output: {error.strerror}") from error


def _prepare_streams() -> None:
    """Make the standard streams of this process safe to use."""
    if None in (sys.stdin, sys.stdout, sys.stderr):
        # The next opened files, those of the store, would otherwise become the streams.
        while (fd := os.open(os.devnull, os.O_RDONLY)) <= _LAST:
            pass
        os.close(fd)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stdout is sys.__stdout__:  # else a caller has redirected the output
        is_terminal = os.isatty(_OUTPUT)
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(_Output(_OUTPUT, "wb", closefd=False)),
            encoding=sys.stdout.encoding if sys.stdout is not None else "utf-8",
            errors="backslashreplace",
            line_buffering=is_terminal,
        )
