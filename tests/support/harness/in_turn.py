# SPDX-License-Identifier: Apache-2.0
"""Commands of the program, one after another, each in a fork of one Python that has imported it.

To start Python and import the program takes half the time of a short command. The Python starts
in the environment that the commands are to run in, so they have what that does to its start.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_MODULES = ("cli.symbolize", "cli.bundle", "symbolize.addresses", "bundle.collect")


class Command(NamedTuple):
    """Arguments of the program, and its standard input, which fits into a pipe."""

    words: Sequence[str]
    text: str = ""


def run_in_turn(
    before: Sequence[str], commands: Sequence[Command], env: Mapping[str, str], cwd: Path
) -> list[subprocess.CompletedProcess[str]]:
    """Run commands in the environment that the words ``before`` make; returns how each ended.

    What these words write to standard error is part of that of each command.
    """
    ends: list[list[int]] = []
    request = []
    for command in commands:
        its_in, our_in = os.pipe()
        os.write(our_in, command.text.encode())
        os.close(our_in)
        (out, its_out), (err, its_err) = os.pipe(), os.pipe()
        ends.append([out, err, its_in, its_out, its_err])
        request.append([list(command.words), its_in, its_out, its_err])
    passed = [fd for each in ends for fd in each[2:]]
    argv = [*before, sys.executable, "-m", "tests.support.harness.in_turn", json.dumps(request)]
    try:
        runner = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            check=False, timeout=240, cwd=cwd, env=env, pass_fds=passed,
        )  # fmt: skip
    finally:
        for fd in passed:
            os.close(fd)
        texts = [[_rest(fd) for fd in each[:2]] for each in ends]
    codes = json.loads(runner.stdout) if runner.returncode == 0 else [runner.returncode] * len(ends)
    return [
        subprocess.CompletedProcess(command.words, code, out, err + runner.stderr)
        for command, code, (out, err) in zip(commands, codes, texts, strict=True)
    ]


def _rest(fd: int) -> str:
    with open(fd, encoding="utf-8", errors="replace") as pipe:
        return pipe.read()


# --- in the environment --------------------------------------------------------------------------


def _main(request: list[tuple[list[str], int, int, int]]) -> None:
    from buildidfs.cli.main import run

    for module in _MODULES:
        importlib.import_module(f"buildidfs.{module}")
    passed = [fd for _, *streams in request for fd in streams]
    codes = []
    for words, *streams in request:
        pid = os.fork()
        if not pid:
            for target, fd in enumerate(streams):
                os.dup2(fd, target)
            for fd in passed:
                os.close(fd)
            sys.argv[1:] = words
            run()
        for fd in streams:
            os.close(fd)
            passed.remove(fd)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    print(json.dumps(codes))


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
