# SPDX-License-Identifier: Apache-2.0
"""buildidfs.mount.invalidate: what the kernel is told after a commit, and that it is bounded."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from buildidfs.errors import IntegrityError
from buildidfs.model import Kind, Trust
from buildidfs.mount import invalidate
from buildidfs.mount.invalidate import Absences, Invalidator
from buildidfs.mount.limits import MountLimits
from buildidfs.view import View
from tests.support.harness.captures import capture, sighting

if TYPE_CHECKING:
    from buildidfs.store import Store

ID = bytes.fromhex("abcdef0123")
OTHER = bytes.fromhex("1234")


class FakeKernel(invalidate.FuseKernel):
    """Remembers what it was told to forget."""

    def __init__(self) -> None:
        self.forgotten: list[tuple[int, bytes]] = []
        self.everything: list[list[tuple[int, bytes]]] = []
        self.known = True

    def forgets_all(self) -> bool:
        return False

    def knows(self, directory: int) -> bool:
        return self.known

    def forget_name(self, directory: int, name: bytes) -> None:
        self.forgotten.append((directory, name))

    def forget_names(self, absent: Iterable[tuple[int, bytes]]) -> None:
        self.everything.append(sorted(absent))


@pytest.fixture
def kernel() -> FakeKernel:
    return FakeKernel()


@contextlib.contextmanager
def _listening(
    store: Store, view: View, absences: Absences, kernel: FakeKernel
) -> Iterator[Invalidator]:
    with (
        contextlib.closing(store.listen()) as listener,
        Invalidator(view, absences, kernel, listener) as running,
    ):
        yield running


# --- absences ------------------------------------------------------------------------------------


def test_absences_are_bounded() -> None:
    absences = Absences(MountLimits(absences=3))
    for number in range(3):
        assert absences.add(1, b"%d" % number)
    assert not absences.add(1, b"3"), "the kernel must not remember what we cannot"
    assert absences.add(1, b"3") is False
    assert len(absences) == 3
    assert absences.discard(1, b"0")
    assert not absences.discard(1, b"0")
    assert absences.add(1, b"3")


def test_absences_make_room_when_the_kernel_has_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(invalidate.time, "monotonic", lambda: now)
    absences = Absences(MountLimits(absences=2, absence_s=10))
    assert absences.add(1, b"a")
    now = 105
    assert absences.add(1, b"b")
    now = 110.5
    assert not absences.add(1, b"c"), "the kernel may have got the first answer a little later"
    now = 111.5
    assert absences.add(1, b"c")
    assert not absences.discard(1, b"a")
    assert absences.discard(1, b"b")


def test_names_that_need_not_be_told() -> None:
    absences = Absences(MountLimits(absences=2))
    absences.keeps_names = False
    assert absences.add(1, b"a")
    assert absences.add(2, b"a")
    assert not absences.add(3, b"a")
    assert absences.discard(1, b"a")
    assert not absences.discard(1, b"a")
    assert absences.take_all() == []
    assert len(absences) == 0
    assert not absences.discard(2, b"a")


def test_take_all() -> None:
    absences = Absences(MountLimits())
    absences.add(1, b"a")
    absences.add(2, b"a")
    assert sorted(absences.take_all()) == [(1, b"a"), (2, b"a")]
    assert len(absences) == 0


# --- commits -------------------------------------------------------------------------------------


def test_only_names_that_were_asked_for_are_invalidated(store: Store, kernel: FakeKernel) -> None:
    view, absences = View(store), Absences(MountLimits())
    directory = view.child(View.ROOT, b"perf")
    for place in [(View.ROOT, ID.hex().encode()), (directory, b"usr"), (directory, b"other"),
                  (View.ROOT, b"abcdef0124")]:  # fmt: skip
        absences.add(*place)
    with _listening(store, view, absences, kernel):
        store.commit([capture(store, b"x", ID)])
        # the commit has returned: it must have happened by now
        told = set(kernel.forgotten)
        left = sorted(absences.take_all())

    assert {(View.ROOT, ID.hex().encode()), (directory, b"usr")} <= told
    assert left == sorted([(directory, b"other"), (View.ROOT, b"abcdef0124")])
    assert not told & set(left)


def waits(event: threading.Event) -> None:
    assert event.wait(30)


def test_nothing_is_invalidated_before_the_kernel_has_agreed_on_a_protocol(
    store: Store, kernel: FakeKernel
) -> None:
    view, absences, agreed = View(store), Absences(MountLimits()), threading.Event()
    absences.add(View.ROOT, ID.hex().encode())
    with (
        contextlib.closing(store.listen()) as listener,
        Invalidator(view, absences, kernel, listener, begin=lambda: waits(agreed)),
        ThreadPoolExecutor(1) as executor,
    ):
        commit = executor.submit(store.commit, [capture(store, b"x", ID)])
        time.sleep(0.1)
        assert kernel.forgotten == []
        agreed.set()
        commit.result()
        assert (View.ROOT, ID.hex().encode()) in kernel.forgotten


def test_names_that_may_lead_elsewhere_are_invalidated(store: Store, kernel: FakeKernel) -> None:
    store.commit([capture(store, b"x", ID, trust=Trust.CONTAINER)])
    view, absences = View(store), Absences(MountLimits())
    directory = view.child(View.ROOT, ID.hex().encode())
    before = view.child(directory, b"elf")
    with _listening(store, view, absences, kernel):
        store.commit([capture(store, b"better", ID, trust=Trust.HOST)])
        told = set(kernel.forgotten)

    assert view.child(directory, b"elf") != before
    assert {(directory, b"elf"), (directory, b"executable")} <= told
    assert (View.ROOT, ID.hex().encode()) not in told, "the directory is what it was"


def test_names_of_what_is_removed_are_invalidated(store: Store, kernel: FakeKernel) -> None:
    at = sighting(b"/opt/app")
    store.commit([capture(store, b"x", ID, at=at), capture(store, b"y", OTHER)])
    view = View(store)
    top = view.child(View.ROOT, ID.hex().encode())
    perf = view.child(View.ROOT, b"perf")
    opt = view.child(perf, b"opt")
    digest = store.index.variants(1, Kind.EXECUTABLE)[0].digest
    removed: list[bool] = []
    with (
        contextlib.closing(store.listen()) as listener,
        Invalidator(view, Absences(MountLimits()), kernel, listener, lambda: removed.append(True)),
    ):
        store.commit([capture(store, b"z", b"\x99\x99")])
        assert not removed
        store.remove([digest])
        assert removed, "its descriptors must not keep its space"
    assert {(View.ROOT, ID.hex().encode()), (top, b"elf"), (perf, b"opt"), (opt, b"app")} <= set(
        kernel.forgotten
    )
    assert not {name for _, name in kernel.forgotten if name == OTHER.hex().encode()}
    assert view.child(View.ROOT, ID.hex().encode()) == 0
    assert view.child(perf, b"opt") == 0


def test_unknown_ordinal_invalidates_all_names(store: Store, kernel: FakeKernel) -> None:
    store.commit([capture(store, b"x", ID)])
    view = View(store)
    store.remove([store.index.variants(1, Kind.EXECUTABLE)[0].digest])
    with contextlib.closing(store.listen()) as listener:
        Invalidator(view, Absences(MountLimits()), kernel, listener).committed([1])
    assert kernel.everything == [[]]


def test_directories_that_the_kernel_does_not_know(store: Store, kernel: FakeKernel) -> None:
    view, absences = View(store), Absences(MountLimits())
    kernel.known = False
    absences.add(View.ROOT, ID.hex().encode())
    with _listening(store, view, absences, kernel):
        store.commit([capture(store, b"x", ID)])
    assert kernel.forgotten == [(View.ROOT, ID.hex().encode())]


def test_mode_and_owner_are_read_again(store: Store, kernel: FakeKernel) -> None:
    store.commit([capture(store, b"x", ID, at=sighting(b"/1", mode=0o100700))])
    view = View(store)
    elf = view.child(view.child(View.ROOT, ID.hex().encode()), b"elf")
    assert view.attributes(elf).mode & 0o777 == 0o500
    with _listening(store, view, Absences(MountLimits()), kernel):
        at = sighting(b"/2", mode=0o100755, trust=Trust.HOST)
        store.commit([capture(store, b"x", ID, at=at)])
    assert view.attributes(elf).mode & 0o777 == 0o555


def test_when_everything_may_have_changed(store: Store, kernel: FakeKernel) -> None:
    view, absences = View(store), Absences(MountLimits())
    absences.add(View.ROOT, b"a")
    absences.add(View.ROOT, b"b")
    moment = absences.moment
    with contextlib.closing(store.listen()) as listener:
        called: list[bool] = []
        Invalidator(view, absences, kernel, listener, lambda: called.append(True)).committed([])

    assert called, "deleted blobs must not be kept by their descriptors"
    assert kernel.everything == [[(View.ROOT, b"a"), (View.ROOT, b"b")]]
    assert len(absences) == 0
    assert absences.moment != moment


def test_lookup_during_commit_is_invalidated(store: Store) -> None:
    """The count changes before any name is looked for: a late "absent" is then asked again."""
    absences = Absences(MountLimits())
    moments: list[int] = []

    class Kernel(FakeKernel):
        def forget_name(self, directory: int, name: bytes) -> None:
            moments.append(absences.moment)

    absences.add(View.ROOT, ID.hex().encode())
    with _listening(store, View(store), absences, Kernel()):
        store.commit([capture(store, b"x", ID)])
    assert moments
    assert set(moments) == {1}


def test_a_failure_is_logged_and_the_committer_goes_on(
    store: Store, kernel: FakeKernel, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(View):
        def spellings(self, ordinal: int) -> Iterator[tuple[int, bytes, bool]]:
            raise IntegrityError("row 1") if ordinal == 1 else KeyError("a fault of ours")

    absences = Absences(MountLimits())
    with _listening(store, Broken(store), absences, kernel):
        committer = threading.Thread(
            target=lambda: [store.commit([capture(store, b"x", bytes([n, n]))]) for n in (1, 2)]
        )
        committer.start()
        committer.join(10)
        assert not committer.is_alive()
    assert absences.moment == 2
    assert "row 1" in caplog.text
    assert "a fault of ours" in caplog.text


def test_the_thread_ends_with_the_block(store: Store, kernel: FakeKernel) -> None:
    with _listening(store, View(store), Absences(MountLimits()), kernel):
        assert "invalidate" in [thread.name for thread in threading.enumerate()]
    assert "invalidate" not in [thread.name for thread in threading.enumerate()]
    store.commit([capture(store, b"x", ID, kinds=[Kind.EXECUTABLE])])
    assert not kernel.forgotten
