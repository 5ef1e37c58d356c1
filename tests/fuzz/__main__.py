# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.fuzz``: atheris over every target, for ten minutes in all.

Options: ``--seconds`` (or FUZZ_SECONDS in the environment) for all targets together, and names of
targets to do only those. What is found anew goes to ``.fuzz/TARGET``, what makes a target fail to
``.fuzz/TARGET-failed``: mend it, and put the file into ``tests/fuzz/corpus/TARGET``, which every
run of the tests goes through.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).resolve().parents[2]
_CORPUS: Final = _ROOT / "tests/fuzz/corpus"
_FOUND: Final = _ROOT / ".fuzz"
_SECONDS: Final = 600
# Of one input, with the instrumentation and on a machine that is busy.
_TIMEOUT_S: Final = 20
_MEMORY_MB: Final = 1024


def main() -> int:
    """Fuzz what is asked for; the exit code is 1 if any target failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*")
    parser.add_argument("--seconds", type=float, default=os.environ.get("FUZZ_SECONDS", _SECONDS))
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.until:
        (name,) = options.targets
        _fuzz(name, options.until)
    from tests.fuzz.targets import TARGETS

    wanted = options.targets or list(TARGETS)
    if unknown := set(wanted) - TARGETS.keys():
        parser.error(f"no such target: {', '.join(sorted(unknown))}")
    end, failed = time.monotonic() + options.seconds, []
    for number, name in enumerate(wanted):
        now = time.monotonic()
        if not _run(name, now + (end - now) / (len(wanted) - number)):
            failed.append(name)
    print(f"{len(wanted) - len(failed)} passed, {len(failed)} failed{': ' if failed else ''}"
          f"{', '.join(failed)}")  # fmt: skip
    return 1 if failed else 0


def _run(name: str, until: float) -> bool:
    """One target, in a process of its own: atheris never comes back, and cleans up nothing.

    ``until`` is a time of time.monotonic(), which is the same for all processes.
    """
    log = _FOUND / f"{name}.log"
    _FOUND.mkdir(exist_ok=True)
    print(f"{name}: ", end="", flush=True)
    argv = [sys.executable, "-m", "tests.fuzz", f"--until={until}", name]
    with tempfile.TemporaryDirectory(prefix="buildidfs-fuzz-") as scratch, log.open("wb") as output:
        environment = {**os.environ, "TMPDIR": scratch}
        done = subprocess.run(argv, cwd=_ROOT, env=environment, stderr=output, check=False)
    text = log.read_text(errors="replace")
    runs = re.findall(r"^(?:Done |stat::number_of_executed_units: )(\d+)", text, re.MULTILINE)
    print(f"{runs[-1] if runs else 'no'} inputs", flush=True)
    if done.returncode != 0:
        print(f"FAILED, see {log}:", text[-3000:], sep="\n", flush=True)
    return done.returncode == 0


def _fuzz(name: str, until: float) -> None:
    import atheris  # type: ignore[import-untyped]  # it has no types

    with atheris.instrument_imports(include=["buildidfs"]):
        from tests.fuzz.targets import TARGETS
    from tests.fuzz import elf_mutation

    target = TARGETS[name]
    found, failed = _FOUND / name, _FOUND / f"{name}-failed"
    found.mkdir(parents=True, exist_ok=True)
    failed.mkdir(exist_ok=True)
    for number, seed in enumerate(target.seeds()):
        (found / f"seed-{number}").write_bytes(seed)
    corpus = _CORPUS / name
    argv = [
        sys.argv[0],
        f"-max_total_time={max(1, round(until - time.monotonic()))}",
        f"-max_len={min(target.most, 1 << 16)}",
        f"-timeout={_TIMEOUT_S}",
        f"-rss_limit_mb={_MEMORY_MB}",
        f"-artifact_prefix={failed}/",
        "-print_final_stats=1",
        str(found),
        *([str(corpus)] if corpus.is_dir() else []),
    ]

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        chosen = random.Random(seed)
        if elf_mutation.numbers(data) and chosen.random() < 0.5:
            return elf_mutation.mutated(data, chosen)[:most]
        return bytes(atheris.Mutate(data, most))

    atheris.Setup(argv, target.check, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
