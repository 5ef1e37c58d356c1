# SPDX-License-Identifier: Apache-2.0
"""How values look to people and to programs.

People get escaped text: a path comes from a container, and a terminal obeys what it is sent.
Programs get one JSON object a line, with build IDs and digests as lower-case hex and paths as
``path``, plus ``path_b64`` where the bytes are not UTF-8.
"""

from __future__ import annotations

import binascii
import contextlib
import os
import sys
import time
from typing import TYPE_CHECKING

import msgspec

from buildidfs.formats import json_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from buildidfs.store.retention.evicted import Evicted, Evictions, Tally
    from buildidfs.store.retention.policy import Policy

_encode = msgspec.json.Encoder().encode


def printable(raw: bytes) -> str:
    """A path for a person: control characters and what is not UTF-8 as ``\\xNN``."""
    return one_line(raw.decode("utf-8", "backslashreplace"))


def one_line(text: str) -> str:
    """A message for a person, of which a path may be a part: control characters as ``\\xNN``."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def path_fields(raw: bytes) -> dict[str, str]:
    """``path``, and ``path_b64`` when the bytes are not UTF-8."""
    try:
        return {"path": raw.decode("utf-8")}
    except UnicodeDecodeError:
        encoded = binascii.b2a_base64(raw, newline=False).decode()
        return {"path": raw.decode("utf-8", "replace"), "path_b64": encoded}


def json_line(values: Mapping[str, object]) -> None:
    """Print one JSON object on a line of its own, with nothing in it that a terminal obeys."""
    sys.stdout.buffer.write(json_text.escaped(_encode(values)) + b"\n")


def size(count: int) -> str:
    """Bytes as people read them: ``17.3 MiB``."""
    if count < 1024:
        return f"{count} B"
    step = min((count.bit_length() - 1) // 10, 4)
    return f"{count / 1024**step:.1f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[step]}"


def age(seconds: int) -> str:
    """Seconds as people write them: ``30d``, ``12h``."""
    for unit, length in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds and seconds % length == 0:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"


def eviction(what: Tally | Evictions) -> str:
    """What was removed to make room, in words; empty if nothing was."""
    said = []
    if what.again:
        said.append(f"{what.again} that can be had again ({size(what.again_bytes)})")
    if what.losses:
        said.append(f"{what.losses} that cannot be had again ({size(what.lost_bytes)})")
    return ", ".join(said)


def evicted_line(each: Evicted) -> str:
    """One blob that was removed to make room."""
    again = f": {each.again}" if each.again else ""
    return f"{each.build_id.hex()} {printable(each.path) or '-'} ({size(each.size)}){again}"


def evicted_fields(what: Tally | Evictions, named: Iterable[Evicted]) -> dict[str, object]:
    """The same for programs."""
    return {
        "recapturable": what.again,
        "recapturable_bytes": what.again_bytes,
        "lost": what.losses,
        "lost_bytes": what.lost_bytes,
        "named": [
            {
                "build_id": each.build_id.hex(),
                **path_fields(each.path),
                "stored_bytes": each.size,
                "time": each.when,
                "again": each.again,
            }
            for each in named
        ],
    }


def limits(policy: Policy) -> str:
    """What a store keeps, in a sentence."""
    said = [] if policy.max_size is None else [f"{size(policy.max_size)} at most"]
    if policy.keep_free:
        said.append(f"{size(policy.keep_free)} free")
    if policy.max_age is not None:
        said.append(f"what was used within {age(policy.max_age)}")
    if policy.min_age:
        said.append(f"in any case what was used within {age(policy.min_age)}")
    return ", ".join(said) or "everything"


def limits_fields(policy: Policy) -> dict[str, int | None]:
    """The same for programs: bytes and seconds."""
    return {
        "max_size": policy.max_size,
        "keep_free": policy.keep_free,
        "max_age": policy.max_age,
        "min_age": policy.min_age,
    }


def moment(nanoseconds: int) -> str:
    """Unix time in nanoseconds as local time, ISO 8601 to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(nanoseconds // 1_000_000_000))


@contextlib.contextmanager
def progress(
    description: str, *, quiet: bool = False
) -> Iterator[Callable[[int, str], None] | None]:
    """A progress bar while the block runs; None when standard error is no terminal, or ``quiet``.

    Call the value with (number of things done so far, what is at hand). How many there are is not
    known before the last, so the bar only says that something is being done.
    """
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    one_line = Column(no_wrap=True, overflow="ellipsis", ratio=1)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(20),
        TextColumn("{task.completed}"),
        TextColumn("{task.fields[what]}", markup=False, table_column=one_line),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, expand=True) as bar:
        task = bar.add_task(description, total=None, what="")

        def show(done: int, what: str) -> None:
            bar.update(task, completed=done, what=printable(os.fsencode(what)))

        yield show
