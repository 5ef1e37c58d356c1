# SPDX-License-Identifier: Apache-2.0
"""buildidfs.watch.daemon: what becomes of a catch, and what is left where nothing is caught."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from buildidfs.capture.live.protocol import (
    Caught,
    Counts,
    Flooded,
    Lost,
    Message,
    Missed,
    ProcessPlace,
)
from buildidfs.ingest.committer import WatchCounters
from buildidfs.linux import inodes
from buildidfs.linux.sdnotify import Notifier
from buildidfs.model import BuildId, NamespaceSet
from buildidfs.shares import HOST, Share
from buildidfs.store import Store
from buildidfs.store.run_files import Presence
from buildidfs.watch import daemon
from buildidfs.watch import pipeline as caught_module
from buildidfs.watch.daemon import Scans, Watch
from buildidfs.watch.state import (
    OTHERS,
    CaptureCounts,
    Event,
    Losses,
    WatchLimits,
    WatchOptions,
    WatchState,
    as_facts,
)
from tests.support.elf.elfwriter import elf_file
from tests.support.harness.children import cat_program, running
from tests.support.harness.scans import open_descriptors, own_namespaces
from tests.support.harness.unable import unable
from tests.support.harness.waiting import lines, until

if TYPE_CHECKING:
    from buildidfs.reports import WatchFacts

ROOT = Path(__file__).resolve().parents[2]
KEY = b"sixteen bytes ab"
A, B = BuildId(b"\xaa" * 20), BuildId(b"\xbb" * 20)


class Caughts:
    """A `Watch` that nobody has started: it is told what the test has caught."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.store = store
        self.events: list[Event] = []
        self.forgotten: list[bytes] = []
        self.scanned: list[int | str] = []
        self.watch = Watch(store, WatchOptions(**options), on_event=self.events.append)
        monkeypatch.setattr(self.watch._watcher, "forget", self.forgotten.extend)
        monkeypatch.setattr(
            self.watch._scans, "process", lambda pid, share="": self.scanned.append(pid)
        )
        monkeypatch.setattr(self.watch._scans, "everything", self.scanned.append)

    def hear(self, message: Message, fd: int = -1) -> None:
        self.watch._heard(message, fd)

    def catch(self, file: Path, build_id: BuildId | None = None, **changes: Any) -> None:
        """As the catcher would tell of a file."""
        fd = os.open(file, os.O_PATH | os.O_CLOEXEC)
        caught = Caught(
            KEY, 4711, time.time_ns(), os.fsencode(file), inodes.identity(fd),
            ProcessPlace(own_namespaces(), 77, b"/system.slice"), build_id,
        )  # fmt: skip
        if build_id is not None:
            os.close(fd)
            fd = -1
        caught = msgspec.structs.replace(caught, **changes)
        self.hear(caught, fd)

    def settle(self) -> None:
        assert self.watch._live.flush(30)

    @property
    def journal(self) -> dict[bytes, BuildId]:
        return {record.path: record.build_id for record in self.store.journal.since()}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    interval = sys.getswitchinterval()
    with Store.create(tmp_path / "store") as made:
        yield made
    sys.setswitchinterval(interval)


@pytest.fixture
def make(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Caughts]]:
    made: list[Caughts] = []

    def one(**options: Any) -> Caughts:
        made.append(Caughts(store, monkeypatch, **options))
        return made[-1]

    before = open_descriptors()
    yield one
    for each in made:
        each.watch.close()
    until(lambda: open_descriptors() <= before, "all descriptors to be closed")


@pytest.fixture
def some(tmp_path: Path) -> Path:
    """A program nobody has open for writing."""
    path = tmp_path / "some"
    path.write_bytes(elf_file(build_id=bytes(A)))
    return path


# --- a catch -------------------------------------------------------------------------------------


def test_catch_is_captured_and_its_process_looked_at(
    make: Callable[..., Caughts], some: Path
) -> None:
    caughts = make()
    caughts.catch(some)
    caughts.settle()
    assert caughts.store.index.ordinal(A) is not None
    assert caughts.journal == {os.fsencode(some): A}
    assert caughts.scanned == [4711]
    (event,) = caughts.events
    assert (event.name, event.build_id, event.reason) == ("captured", A, "")
    assert event.sighting.origin.scanner == "watch"
    assert caughts.watch.state().ingest.captured == 1


def test_known_file_is_held_and_noted(make: Callable[..., Caughts]) -> None:
    caughts = make()
    program = cat_program()  # whose last change was so long ago that its times say all
    caughts.catch(program)
    caughts.settle()
    (event,) = caughts.events
    caughts.catch(program, path=b"/elsewhere")
    caughts.settle()
    assert len(caughts.events) == 1
    assert caughts.journal == dict.fromkeys((os.fsencode(program), b"/elsewhere"), event.build_id)
    assert caughts.scanned == [4711], "what is known brings nothing new"


def test_catch_without_a_file_is_noted_and_sent_again(
    make: Callable[..., Caughts], some: Path
) -> None:
    caughts = make()
    caughts.catch(some, B)
    caughts.settle()
    assert caughts.store.index.ordinal(B) is None
    assert caughts.journal == {os.fsencode(some): B}
    assert caughts.forgotten == [KEY]
    assert caughts.events == []


@pytest.mark.parametrize(
    ("globs", "path", "wanted"),
    [
        ((), b"/tmp/a.so", True),
        (("/tmp/*",), b"/tmp/a.so", False),
        (("/tmp/*",), b"/tmp/deep/a.so", False),
        (("/tmp/*",), b"/var/tmp/a.so", True),
        (("*.so",), b"/tmp/a.so.1", True),
        (("*.so", "/opt/*"), b"/opt/b", False),
        (("/tmp/[ab].so",), b"/tmp/c.so", True),
        (("/tmp/?.so",), b"/tmp/\xff.so", False),
        ((os.fsdecode(b"/\xff*"),), b"/\xff\n", False),
        (("/a\n*",), b"/a\nb", False),
        (("/caf\u00e9*",), "/café/x".encode(), False),
        (("/tmp",), b"/tmp/a.so", True),
    ],
)
def test_excluded_paths(
    make: Callable[..., Caughts], some: Path, globs: tuple[str, ...], path: bytes, wanted: bool
) -> None:
    caughts = make(exclude=globs)
    caughts.catch(some, path=path)
    caughts.settle()
    assert (caughts.store.index.ordinal(A) is not None) is wanted
    assert (caughts.journal == {path: A}) is wanted
    assert caughts.forgotten == []


@pytest.mark.parametrize(
    ("containers", "wanted"),
    [
        ((), True),
        (("docker:0123456789ab",), True),
        (("0123",), True),
        (("k8s:0123",), False),
        (("4567", "docker:01"), True),
        (("4567",), False),
    ],
)
def test_containers(
    make: Callable[..., Caughts], some: Path, containers: tuple[str, ...], wanted: bool
) -> None:
    caughts = make(containers=containers)
    there = msgspec.structs.replace(own_namespaces(), mnt=1)
    place = ProcessPlace(there, 78, b"/docker/" + b"0123456789abcdef" * 4)
    caughts.catch(some, place=place)
    caughts.settle()
    assert (caughts.store.index.ordinal(A) is not None) is wanted


def test_what_is_no_regular_file_is_said(
    make: Callable[..., Caughts], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.mkfifo(tmp_path / "fifo")
    caughts = make()
    for _ in range(15):
        caughts.catch(tmp_path / "fifo")
    caughts.settle()
    assert {(event.name, event.build_id) for event in caughts.events} == {("not captured", None)}
    assert len(caughts.events) == 15
    assert all(event.reason for event in caughts.events)
    assert caughts.forgotten == [KEY] * 15
    named = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert len(named) == 10, "so many a minute"
    assert "not captured: " in named[0].message


def test_descriptors_are_closed_but_not_at_once(
    make: Callable[..., Caughts], some: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The catcher closes its copy of the same file first: the last one to close does the work."""
    soon = make(exclude=("*",))
    before = open_descriptors()
    soon.catch(some)
    until(lambda: open_descriptors() <= before, "the descriptor to be closed")
    monkeypatch.setattr(caught_module, "_CLOSE_AFTER_S", 3600.0)
    late = make(exclude=("*",))
    before = open_descriptors()
    late.catch(some)
    assert open_descriptors() == before + 1
    late.watch.close()
    assert open_descriptors() <= before


# --- what else the catcher says ------------------------------------------------------------------


def test_counts_go_on_after_a_restart(make: Callable[..., Caughts]) -> None:
    caughts = make()
    caughts.hear(Counts(1, 2, 3, 4, 5))
    caughts.hear(Counts(10, 20, 30, 40, 50))
    assert caughts.watch.state().catcher == Counts(10, 20, 30, 40, 50)
    caughts.watch._ended("it was killed")
    state = caughts.watch.state()
    assert state.catcher == Counts(10, 20, 30, 40, 50)
    assert (state.restarts, state.mode) == (1, "interrupted")
    caughts.hear(Counts(1, 1, 1, 1, 1))
    assert caughts.watch.state().catcher == Counts(11, 21, 31, 41, 51)


def test_gaps_and_refusals_are_looked_at(make: Callable[..., Caughts]) -> None:
    caughts = make()
    caughts.hear(Missed(1, b"/gone", "No such file or directory", 2))
    assert caughts.scanned == []
    caughts.hear(Missed(2, b"/closed", "Permission denied", 13))
    caughts.hear(Lost(7, "too fast"))
    assert caughts.scanned == [2, "too fast"]


# --- scans ---------------------------------------------------------------------------------------


def test_scan_leaves_out_what_is_not_wanted(make: Callable[..., Caughts], tmp_path: Path) -> None:
    program = tmp_path / "own-cat"
    program.write_bytes(cat_program().read_bytes())
    program.chmod(0o755)
    before = open_descriptors()
    with running([program]) as child:
        apart = make(exclude=("*",))
        apart.watch._look([child.pid], threading.Event())
        elsewhere = make(containers=("docker:0123456789ab",))
        elsewhere.watch._look([child.pid], threading.Event())
        ended = make()
        end = threading.Event()
        end.set()
        ended.watch._look([child.pid], end)
        for each in (apart, elsewhere, ended):
            each.settle()
            assert each.journal == {}
        wanted = make()
        wanted.watch._look([child.pid], threading.Event())
        wanted.settle()
    assert os.fsencode(program) in wanted.journal
    for each in (apart, elsewhere, ended, wanted):
        each.watch.close()
    assert open_descriptors() <= before


# --- where nothing is caught ---------------------------------------------------------------------

_RUNNER = """
import json, sys
from buildidfs import log
from buildidfs.watch.daemon import Watch
from buildidfs.watch.state import WatchOptions
from buildidfs.errors import BuildIdFsError
from buildidfs.store import Store
from buildidfs.store.run_files import Presence
log.setup(0)
with Store.create(sys.argv[1]) as store:
    watch = Watch(store, WatchOptions(**json.loads(sys.argv[2])))
    try:
        watch.start()
        print("ready", flush=True)
        for line in sys.stdin:
            watch.tend()
            state = watch.state()
            paths = [record.path.decode() for record in store.journal.since()]
            print(json.dumps([state.mode, state.degraded, state.scans, paths]), flush=True)
    except BuildIdFsError as error:
        print(type(error).__name__, error, flush=True)
    finally:
        watch.close()
"""


class Blind:
    """A `Watch` in a process of its own to which no events are told."""

    def __init__(self, directory: Path, options: dict[str, Any]) -> None:
        argv = [sys.executable, "-c", _RUNNER, directory / "store", json.dumps(options)]
        self.process = subprocess.Popen(
            unable(*argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            cwd=ROOT,
        )  # fmt: skip

    def line(self) -> str:
        assert self.process.stdout is not None
        (line,) = lines(self.process.stdout, lambda got: len(got) == 1, 60)
        return line

    def ask(self) -> tuple[str, list[str], int, list[str]]:
        """Its mode, what is less than it could be, its scans, and the paths of the journal."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()
        mode, degraded, scans, paths = json.loads(self.line())
        return mode, degraded, scans, paths

    def end(self) -> str:
        """Returns what it wrote to standard error."""
        _, err = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, err
        return str(err.decode())


@pytest.fixture
def blind(tmp_path: Path) -> Iterator[Callable[..., Blind]]:
    made: list[Blind] = []

    def one(**options: Any) -> Blind:
        made.append(Blind(tmp_path, options))
        return made[-1]

    yield one
    for each in made:
        with each.process:
            each.process.kill()


def _cat(path: Path) -> Sequence[str | os.PathLike[str]]:
    path.write_bytes(cat_program().read_bytes())
    path.chmod(0o755)
    return [os.fsdecode(word) for word in unable(path)]


def test_without_events_it_scans_again_and_again(
    blind: Callable[..., Blind], tmp_path: Path
) -> None:
    watch = blind(exclude=["*/excluded"], scan=False)
    assert watch.line() == "ready"
    mode, degraded, _, _ = watch.ask()
    assert mode == "polling"
    (text,) = degraded
    assert text.startswith("cannot follow what is mapped: ")
    assert text.endswith(": scanning every 2 s instead")
    # Some time after the first scan, which therefore does not see it.
    until(lambda: watch.ask()[2] >= 1, "the first scan", 60)
    with running(_cat(tmp_path / "excluded")), running(_cat(tmp_path / "later")):
        until(lambda: str(tmp_path / "later") in watch.ask()[3], "the capture", 60)
        seen = watch.ask()[2]
        until(lambda: watch.ask()[2] >= seen + 2, "more scans", 60)
    assert str(tmp_path / "excluded") not in watch.ask()[3]
    err = watch.end()
    assert err == f"buildidfs: warning: {text}\n"


class _Observer:
    def event(self, event: Event) -> None: ...

    def turn(self, facts: WatchFacts, now: float) -> None: ...

    def line(self, facts: WatchFacts) -> str:
        return ""

    def end(self, facts: WatchFacts) -> None: ...


class _Turns(threading.Event):
    """Calls a function in each turn instead of waiting, and keeps the seconds to wait."""

    def __init__(self, work: Sequence[Callable[[], object]], stop: threading.Event) -> None:
        super().__init__()
        self.waits: list[float | None] = []
        self._work, self._stop = list(work), stop

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout)
        self._work.pop(0)()
        if not self._work:
            self._stop.set()
        return True


def test_watch_wakes_up_half_as_often_while_its_state_is_unchanged(
    make: Callable[..., Caughts], store: Store
) -> None:
    caughts, stop = make(), threading.Event()

    def count() -> None:
        caughts.hear(Counts(records=7))

    turns = _Turns((lambda: None, count, lambda: None), stop)
    with Presence(store.path, "watch") as presence:
        observer = _Observer()
        daemon._follow(caughts.watch, stop, turns, observer, presence, Notifier({}))
        assert turns.waits == [2.0, 2.0, 1.0]  # in the last turn its report is due soon


def test_losses_are_counted_by_reason_and_container_in_bounded_memory() -> None:
    losses = Losses(WatchLimits(losses=2))
    losses.add("not in time", "docker:a", 7)
    losses.add("not in time", "docker:a", 8, 5)
    losses.add("gone", "", 1)
    for number in range(50):
        losses.add("not in time", f"docker:{number}", number, share=Share("uid 1000", f"{number}"))
        losses.add(f"reason {number}", "", number)
    rows = {(row.reason, row.container): row.count for row in losses.rows()}
    assert rows["not in time", "docker:a"] == 6
    assert rows["gone", ""] == 1
    assert rows["not in time", OTHERS] == 49
    assert sum(rows.values()) == 107, "what there is no row for is counted all the same"
    assert len(rows) <= 6
    assert losses.rows()[0].container == ""


def test_owner_with_many_containers_hides_no_other_container() -> None:
    """In the rows of losses, and in the fewer rows that `status` shows."""
    losses, sources = Losses(WatchLimits()), CaptureCounts(WatchLimits())
    for number in range(2000):
        losses.add("late", f"mnt:{number}", 1, 1000, share=Share("uid 1000", f"mnt:{number}"))
        sources.add(f"mnt:{number}", 1, Share("uid 1000", f"mnt:{number}"))
        if number == 300:
            losses.add("late", "docker:a", 1)
            sources.add("docker:a", 1)
    assert sum(row.count for row in losses.rows()) == 2_000_001
    assert sum(row.recent for row in losses.rows()) == 2_000_001
    assert sum(row.captured for row in sources.rows()) == 2001
    state = WatchState(
        "following", (), Counts(), WatchCounters(), 0, 0, 0, 0, idle=True,
        losses=losses.rows(), sources=sources.rows(),
    )  # fmt: skip
    for name in ("losses", "sources"):
        shown = [row.container for row in getattr(as_facts(state), name)]
        assert len(shown) == 32
        assert "docker:a" in shown


def test_losses_of_containers_hide_none_on_the_host() -> None:
    losses = Losses(WatchLimits())
    for number in range(1000):
        losses.add(f"reason {number % 7}", f"mnt:{number}", number, 1000)
    losses.add("gone", "", 1)
    for number in range(1000):
        losses.add("other", f"mnt:{number}", number, 1000)
    first = losses.rows()[0]
    assert (first.reason, first.container, first.recent) == ("gone", "", 1)


def test_lost_files_are_named_so_many_of_each_container() -> None:
    losses = Losses(WatchLimits())
    losses.add("late", "docker:a", 1, path=b"/bin/x", build_id=A)
    losses.add("late", "docker:a", 1, path=b"/bin/x", build_id=A)
    for number in range(1000):
        losses.add("late", "docker:flood", 2, path=b"/%d" % number)
    losses.add("late", "", 3, path=b"/bin/host")
    taken = losses.take()
    rows = {(each.container, each.path): each.count for each in taken}
    assert rows["docker:a", b"/bin/x"] == 2
    assert taken[0].build_id == A
    assert rows["", b"/bin/host"] == 1
    flood = [each.count for each in taken if each.container == "docker:flood"]
    assert sum(flood) == 1000
    assert len(flood) < 300
    assert rows["docker:flood", b""] > 700
    assert losses.take() == []


def test_losses_are_recent_for_ten_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    at = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: at[0])
    losses = Losses(WatchLimits())
    losses.add("gone", "", 1, 5)
    losses.add_events(3)
    at[0] = 300.0
    losses.add("gone", "", 1, 2)
    losses.add("late", "docker:a", 2, 1)
    assert [(row.reason, row.count, row.recent) for row in losses.rows()] == [
        ("gone", 7, 7),
        ("late", 1, 1),
    ]
    assert losses.recent_events() == 3
    at[0] = 660.0
    assert [(row.reason, row.count, row.recent) for row in losses.rows()] == [
        ("gone", 7, 2),
        ("late", 1, 1),
    ]
    assert losses.recent_events() == 0
    at[0] = 6000.0
    assert {row.recent for row in losses.rows()} == {0}


def test_missed_file_is_counted_for_its_container(make: Callable[..., Caughts]) -> None:
    watch = make()
    inside = msgspec.structs.replace(own_namespaces(), mnt=4711)
    place = ProcessPlace(inside, 99, b"/docker/" + b"0f5c3e8d1b2a" + b"0" * 52)
    watch.hear(Missed(4711, b"/app/run", "No such process", 3, place))
    (loss,) = watch.watch.state().losses
    assert (loss.reason, loss.container) == ("No such process", "docker:0f5c3e8d1b2a")
    assert (loss.mnt_ns_id, loss.count) == (99, 1)
    watch.watch.tend()
    (row,) = watch.store.lost_since()
    assert (row.raw_path, row.container, row.reason) == (
        b"/app/run", "docker:0f5c3e8d1b2a", "No such process",
    )  # fmt: skip


def test_container_that_floods_is_named_once(
    make: Callable[..., Caughts], caplog: pytest.LogCaptureFixture
) -> None:
    watch = make()
    inside = msgspec.structs.replace(own_namespaces(), mnt=4711)
    for _ in range(3):
        watch.hear(
            Flooded(ProcessPlace(inside, 99, b"/elsewhere"), 1000, (b"/tmp/a", b"/tmp/b\x1b"))
        )
    (loss,) = watch.watch.state().losses
    assert (loss.container, loss.count, loss.mnt_ns_id) == ("mnt:4711", 3000, 99)
    (record,) = [record for record in caplog.records if "faster" in record.message]
    assert "mnt:4711 maps" in record.message
    assert "/tmp/a" in record.message
    assert "\x1b" not in record.message


@pytest.mark.host
def test_user_who_floods_from_many_namespaces_is_logged_once(
    make: Callable[..., Caughts], caplog: pytest.LogCaptureFixture
) -> None:
    watch = make()
    for mnt in range(4711, 5711):
        place = ProcessPlace(NamespaceSet(mnt=mnt), mnt, b"/user.slice", owner=1000)
        watch.hear(Flooded(place, 1000, (b"/tmp/a",)))
    assert len([record for record in caplog.records if "faster" in record.message]) == 1


VICTIM = b"0f5c3e8d1b2a" + b"0" * 52


@pytest.mark.host
def test_pins_are_those_of_their_container(make: Callable[..., Caughts], some: Path) -> None:
    watch = make()
    live = watch.watch._sightings
    caught = Caught(
        KEY, 4711, time.time_ns(), os.fsencode(some), inodes.identity_at(-1, os.fsencode(some)),
        ProcessPlace(own_namespaces(), 77, b"/system.slice"),
    )  # fmt: skip

    def share(**changes: Any) -> Share:
        found = msgspec.structs.replace(caught, **changes)
        return live.share(found.place)

    inside = msgspec.structs.replace(own_namespaces(), mnt=4711)
    mine = msgspec.structs.replace(caught.identity, uid=1000)
    roots = msgspec.structs.replace(caught.identity, uid=0)
    for identity in (mine, roots):
        assert share(identity=identity) == HOST, "the catcher decides"
        on_host = msgspec.structs.replace(caught.place, owner=1000)
        assert share(identity=identity, place=on_host) == Share("uid 1000")
        assert share(identity=identity, place=ProcessPlace(inside, 99, b"")).owner == "mnt:4711"
        docker = ProcessPlace(inside, 99, b"/docker/" + VICTIM + b"/init")
        assert share(identity=identity, place=docker).owner == f"/docker/{VICTIM.decode()}"
        imitation = ProcessPlace(inside, 99, b"/docker-" + VICTIM + b".scope", owner=1000)
        assert share(identity=identity, place=imitation).owner == "uid 1000"


IMITATIONS = [
    ProcessPlace(
        NamespaceSet(mnt=4711), 99, b"/user.slice/user-1000.slice/docker-" + VICTIM + b".scope"
    ),
    ProcessPlace(
        NamespaceSet(mnt=4711), 99, b"/docker/" + b"a" * 64 + b"/docker-" + VICTIM + b".scope"
    ),
]


@pytest.mark.host
@pytest.mark.parametrize("place", IMITATIONS, ids=["slice", "nested"])
def test_container_is_not_blamed_for_a_flood_of_its_imitation(
    make: Callable[..., Caughts], caplog: pytest.LogCaptureFixture, place: ProcessPlace
) -> None:
    watch = make()
    watch.hear(Flooded(place, 1000, (b"/tmp/a",)))
    (loss,) = watch.watch.state().losses
    assert loss.container != "docker:0f5c3e8d1b2a"
    assert loss.container.startswith("docker:0f5c3e8d1b2a ")
    (record,) = [record for record in caplog.records if "faster" in record.message]
    assert record.message.startswith(f"{loss.container} maps"), record.message
    watch.hear(Flooded(ProcessPlace(place.namespaces, 9, b"/docker/" + VICTIM), 10, (b"/tmp/a",)))
    assert {each.container: each.count for each in watch.watch.state().losses} == {
        loss.container: 1000, "docker:0f5c3e8d1b2a": 10,
    }  # fmt: skip


Look = list[int] | None


class Looked:
    """A `Scans` whose looks only note what was to be looked at, and do what ``during`` says."""

    def __init__(self) -> None:
        self.looks: list[Look] = []
        self.begun: list[float] = []
        self.ended: list[float] = []
        self.during: Callable[[Look, threading.Event], None] = lambda pids, ending: None
        self.scans = Scans(self._look)

    def _look(self, pids: Sequence[int] | None, ending: threading.Event) -> None:
        omitted = None if pids is None else list(pids)
        self.begun.append(time.monotonic())
        self.looks.append(omitted)
        try:
            self.during(omitted, ending)
        finally:
            self.ended.append(time.monotonic())

    def wait(self, number: int) -> None:
        until(lambda: len(self.ended) >= number, f"{number} looks")

    def settle(self, pid: int) -> None:
        """Return when all that was asked for has been done: one that is asked for last is."""
        until(lambda: self.scans.is_idle, "an end of the looks")
        self.scans.process(pid)
        until(lambda: self.looks[-1:] == [[pid]] and self.scans.is_idle, "the last look")


@pytest.fixture
def looked() -> Iterator[Looked]:
    made = Looked()
    yield made
    made.scans.close()


@pytest.fixture
def held(looked: Looked) -> Iterator[threading.Event]:
    """The first look goes on until this is set."""
    go_on = threading.Event()
    looked.during = lambda pids, ending: None if go_on.is_set() else _wait(go_on)
    yield go_on
    go_on.set()


def _wait(event: threading.Event) -> None:
    assert event.wait(30)


def test_nothing_is_looked_at_unasked(looked: Looked) -> None:
    assert not looked.scans.is_idle, "it has not begun"
    looked.scans.start()
    looked.settle(1)
    assert looked.looks == [[1]]
    assert looked.scans.count == 0


@pytest.fixture
def long_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than anybody waits here."""
    monkeypatch.setattr(daemon, "_BETWEEN_S", 600.0)


@pytest.mark.usefixtures("long_pause")
def test_first_look_at_everything_is_at_once(looked: Looked) -> None:
    looked.scans.everything("start")
    looked.scans.start()
    looked.wait(1)
    assert looked.looks == [None]
    until(lambda: looked.scans.count == 1, "the count")
    assert looked.scans.is_idle


def test_asked_twice_is_done_once(looked: Looked, held: threading.Event) -> None:
    looked.scans.start()
    looked.scans.everything("start")
    until(lambda: looked.looks, "the first look")
    assert not looked.scans.is_idle
    for _ in range(5):
        looked.scans.everything("a gap")
    held.set()
    looked.wait(2)
    looked.settle(1)
    assert looked.looks == [None, None, [1]]
    assert looked.scans.count == 2


@pytest.mark.parametrize("when", ["during", "after"])
def test_looks_at_everything_have_pauses(looked: Looked, held: threading.Event, when: str) -> None:
    """What makes events come too fast is not over when the look is, which takes a CPU."""
    looked.scans.start()
    looked.scans.everything("start")
    until(lambda: looked.looks, "the first look")
    if when == "during":
        looked.scans.everything("a gap")
    held.set()
    looked.wait(1)
    looked.scans.everything("a gap")
    looked.wait(2)
    assert looked.looks == [None, None]
    assert looked.begun[1] - looked.ended[0] >= daemon._BETWEEN_S - 0.01


@pytest.mark.usefixtures("long_pause")
def test_look_at_a_process_delays_no_look_at_everything(looked: Looked) -> None:
    looked.scans.start()
    looked.scans.process(7)
    looked.wait(1)
    until(lambda: looked.scans.is_idle, "an end of the look")
    looked.scans.everything("start")
    looked.wait(2)
    assert looked.looks == [[7], None]


def test_processes_are_looked_at_together_after_a_moment(looked: Looked) -> None:
    looked.scans.start()
    asked = time.monotonic()
    for pid in (30, 10, 20, 10, 30):
        looked.scans.process(pid)
    looked.wait(1)
    looked.settle(1)
    assert looked.looks == [[30, 10, 20], [1]]
    assert looked.begun[0] - asked >= daemon._SETTLED_S - 0.01
    assert looked.scans.count == 0


def test_more_processes_than_are_worth_it(looked: Looked) -> None:
    for pid in range(5000):
        looked.scans.process(pid)
    looked.scans.start()
    looked.wait(1)
    assert looked.looks[0] == list(range(1024))


def test_processes_of_one_container_leave_room_for_others(looked: Looked) -> None:
    for pid in range(5000):
        looked.scans.process(pid, Share("uid 1000", f"mnt:{pid}"))
    for pid in range(5000, 5010):
        looked.scans.process(pid, Share("/docker/b"))
        looked.scans.process(pid + 100)
    looked.scans.start()
    looked.wait(1)
    (pids,) = looked.looks
    assert pids is not None
    assert len(pids) == 768 + 10
    assert set(pids[:30]) > {*range(5000, 5010), *range(5100, 5110)}


def test_look_at_everything_is_one_at_each_process(looked: Looked, held: threading.Event) -> None:
    looked.scans.start()
    looked.scans.process(7)
    looked.scans.everything("start")
    until(lambda: looked.looks, "the first look")
    looked.scans.process(8)  # may have been passed already
    held.set()
    looked.wait(2)
    looked.settle(1)
    assert looked.looks == [None, [8], [1]]


def test_again_and_again(looked: Looked) -> None:
    looked.scans.start()
    looked.scans.every(0.05)
    looked.wait(4)
    looked.scans.close()
    assert looked.looks == [None] * len(looked.looks)
    assert not looked.scans.is_idle
    pauses = [b - a for a, b in zip(looked.ended, looked.begun[1:], strict=False)]
    assert min(pauses) >= 0.04


def test_a_fault_ends_one_look(looked: Looked, caplog: pytest.LogCaptureFixture) -> None:
    def fail(pids: Look, ending: threading.Event) -> None:
        raise RuntimeError("a fault")

    looked.during = fail
    looked.scans.start()
    looked.scans.process(7)
    looked.wait(1)
    looked.scans.everything("start")
    looked.wait(2)
    until(lambda: looked.scans.is_idle, "an end of the look")
    looked.during = lambda pids, ending: None
    looked.settle(1)
    assert looked.looks == [[7], None, [1]]
    assert [record.message for record in caplog.records if record.exc_info] == [
        "a look at running processes failed"
    ] * 2


def test_close_in_the_middle_of_a_look(looked: Looked) -> None:
    looked.during = lambda pids, ending: _wait(ending)
    looked.scans.start()
    looked.scans.everything("start")
    until(lambda: looked.looks, "the look")
    looked.scans.everything("a gap")
    looked.scans.process(7)
    looked.scans.close()
    assert looked.looks == [None]
    assert len(looked.ended) == 1
    assert looked.scans.count == 0, "it was not finished"
    looked.scans.close()


def test_close_while_nothing_is_done_and_before_the_start(looked: Looked) -> None:
    Scans(looked.scans._look).close()
    looked.scans.start()
    looked.scans.process(7)
    looked.scans.close()
    assert looked.looks == []
