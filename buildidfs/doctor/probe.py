# SPDX-License-Identifier: Apache-2.0
"""Run each probe in a child process, so that a probe that dies or hangs does not end the others.

A damaged index kills its reader, because it is mapped memory; a filesystem without its server
blocks a reader for ever; trying a scheduling class changes that of the process. The parent abandons
a silent child, and another child continues with the next probe.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import msgspec

from buildidfs.linux import child
from buildidfs.names import one_line

State = Literal["ok", "degraded", "failed"]
#: Longer than any probe takes on a busy machine.
PATIENCE = 5.0
_LAST_WAIT = 0.5  # seconds to wait for the end of a killed child
_CHUNK = 1 << 16
_MOST_BYTES = 1000  # of one text; the rest does not come from a probe
_encode = msgspec.json.Encoder().encode


class ProbeFinding(msgspec.Struct, frozen=True):
    """The finding of one probe.

    ``failed``: unless this is remedied, captures are missing, or the store can capture or serve
    nothing. ``degraded``: the feature works, but costs more, guarantees less, or may fail soon.
    ``found`` and ``remedy`` are for people, one line each; the remedy of an ``ok`` is empty.
    """

    area: str
    name: str
    state: State
    found: str
    remedy: str = ""


class ProbeOutcome(msgspec.Struct, frozen=True):
    """A finding without the name of its probe; made by `ok`, `degraded` and `failed`."""

    state: State
    found: str
    remedy: str = ""


class Probe(msgspec.Struct, frozen=True):
    """One check: ``ask`` looks, and changes nothing.

    It may raise OSError and similar errors if it finds no answer. ``place`` names a place that may
    never answer: after one timeout, no other probe of the same place runs.
    """

    area: str
    name: str
    ask: Callable[[], ProbeOutcome]
    place: str = ""


def ok(found: str) -> ProbeOutcome:
    """Return the finding that a feature works."""
    return ProbeOutcome("ok", found)


def degraded(found: str, remedy: str) -> ProbeOutcome:
    """Return the finding that something works with restrictions."""
    return ProbeOutcome("degraded", found, remedy)


def failed(found: str, remedy: str) -> ProbeOutcome:
    """Return the finding that something does not work."""
    return ProbeOutcome("failed", found, remedy)


_decoder = msgspec.json.Decoder(ProbeOutcome)


def ask(probes: Sequence[Probe], seconds: float = PATIENCE) -> Iterator[ProbeFinding]:
    """Yield the finding of each probe in order, as they come.

    A probe that does not answer within ``seconds``, or dies, is a finding too. This function forks,
    so the process must have a single thread.
    """
    rest, silent = list(probes), set[str]()
    while rest:
        with _Answers(rest) as answers:
            while rest:
                probe = rest[0]
                if probe.place in silent:
                    break
                answer = answers.answer(seconds)
                yield ProbeFinding(
                    probe.area, probe.name, answer.state, answer.found, answer.remedy
                )
                del rest[0]
                if answers.is_over:
                    if answers.is_silent and probe.place:
                        silent.add(probe.place)
                    break
        # A probe that would wait for the same place again is left out: one finding is enough.
        rest = [probe for probe in rest if probe.place not in silent]


class _Answers:
    """A process that runs the probes one after another and answers with one line of JSON each."""

    def __init__(self, probes: Sequence[Probe]) -> None:
        self.is_over = self.is_silent = False
        self._text = b""
        self._pipe, writing = os.pipe()
        self._process = child.fork(lambda: _answer_all(probes, writing))
        os.close(writing)

    def __enter__(self) -> _Answers:
        return self

    def __exit__(self, *exc: object) -> None:
        """End the process. If the kernel blocks the process, it ends when the kernel
        releases it.
        """
        os.close(self._pipe)
        self._process.end(_LAST_WAIT)

    def answer(self, seconds: float) -> ProbeOutcome:
        """Return the next answer, or a finding on why there is none."""
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        while b"\n" not in self._text:
            if not poll.poll(seconds * 1000):
                self.is_over = self.is_silent = True
                return degraded(
                    f"cannot be told: no answer within {seconds:g} s",
                    "see which filesystem or server is silent, and repair or unmount it",
                )
            chunk = os.read(self._pipe, _CHUNK)
            if not chunk:
                self.is_over = True
                return self._death()
            self._text += chunk
        line, _, self._text = self._text.partition(b"\n")
        return _decoder.decode(line)

    def _death(self) -> ProbeOutcome:
        code = self._process.wait() or 0
        name = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        return failed(
            f"looking at it ended a process with {name}: what is there is damaged",
            "look at the messages of the kernel (dmesg); if it was the index, which is mapped,"
            " buildidfs check --repair makes it again from the blobs",
        )


def _answer_all(probes: Sequence[Probe], pipe: int) -> None:
    for probe in probes:
        data = _encode(_answer(probe)) + b"\n"
        while data:
            data = data[os.write(pipe, data) :]


def _answer(probe: Probe) -> ProbeOutcome:
    try:
        answer = probe.ask()
    except OSError as error:
        where = f" ({os.fsdecode(error.filename)})" if error.filename else ""
        answer = _unknown(f"{error.strerror or error}{where}")
    except Exception as error:  # the top of a process: a fault of one probe must not end the others
        answer = _unknown(f"{type(error).__name__}: {error}")
    return ProbeOutcome(answer.state, _one_line(answer.found), _one_line(answer.remedy))


def _unknown(why: str) -> ProbeOutcome:
    where = "on the host" if os.geteuid() == 0 else "as root, on the host"
    return degraded(f"cannot be told: {why}", f"run it {where}, to be told")


def _one_line(text: str) -> str:
    """Return a text as one printable line."""
    return one_line(text.encode("utf-8", "backslashreplace").decode()[:_MOST_BYTES])
