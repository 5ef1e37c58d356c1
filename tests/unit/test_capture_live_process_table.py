# SPDX-License-Identifier: Apache-2.0
"""Who lives where, from what was told of them, whenever it was told."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildidfs.capture.live import process_table
from buildidfs.capture.live.process_table import Home, Tasks
from buildidfs.formats.container import cgroup
from buildidfs.linux import namespaces, procfs
from buildidfs.model import NamespaceSet
from tests.support.clients.tools import tool
from tests.support.harness.children import cat_program, needs_root, private_cat, running
from tests.support.harness.scans import open_descriptors, own_namespaces

HERE, THERE = NamespaceSet(mnt=10), NamespaceSet(mnt=11)
GONE = 4194303
SECOND = 1_000_000_000


@pytest.fixture(autouse=True)
def _descriptors_are_closed() -> Iterator[None]:
    before = open_descriptors()
    yield
    assert open_descriptors() <= before


@pytest.fixture
def family() -> Tasks:
    """Process 1 lives here since time 1."""
    family = Tasks()
    family.entered(1, HERE, 1)
    return family


def lives(family: Tasks, pid: int, time: int = 1 << 60) -> NamespaceSet | None:
    return family.home_at(pid, time).namespaces


def test_children_share_the_home_of_their_parent(family: Tasks) -> None:
    family.forked(2, 1, 2)
    family.entered(2, HERE, 3)
    family.forked(3, 2, 4)
    assert family.home_at(3, 5) is family.home_at(1, 5)
    assert set(family.home_at(3, 5).pids) == {1, 2, 3}


def test_who_moves_leaves_the_others_where_they_are(family: Tasks) -> None:
    family.forked(2, 1, 2)
    family.entered(2, THERE, 3)
    family.entered(2, THERE, 4)
    assert (lives(family, 1), lives(family, 2)) == (HERE, THERE)
    family.forked(3, 2, 5)
    assert lives(family, 3) == THERE
    # The same number does not make it the same home: these two have not met.
    family.forked(4, 1, 6)
    family.entered(4, THERE, 7)
    assert family.home_at(4, 8) is not family.home_at(3, 8)


def test_a_child_that_is_born_elsewhere(family: Tasks) -> None:
    """clone(CLONE_NEWNS): the birth is told first, and then where it is."""
    family.forked(2, 1, 2)
    family.entered(2, THERE, 2)
    assert (lives(family, 1), lives(family, 2)) == (HERE, THERE)


@pytest.mark.parametrize("entered", [100, 230])
def test_old_record_of_a_fork_changes_no_home(family: Tasks, entered: int) -> None:
    """The ring of mappings has a copy of the record of the fork, and is read later."""
    family.forked(2, 1, 100)
    family.entered(2, THERE, entered)
    family.forked(2, 1, 100)
    assert lives(family, 2) == THERE


def test_old_record_of_a_namespace_changes_no_home(family: Tasks) -> None:
    family.forked(2, 1, 100)
    family.entered(2, THERE, 90)
    assert lives(family, 2) == HERE


def test_another_mount_namespace_is_news_another_network_is_not(family: Tasks) -> None:
    family.entered(1, NamespaceSet(net=7, mnt=10), 2)
    assert lives(family, 1) == NamespaceSet(net=7, mnt=10)
    family.entered(1, THERE, 3)


def test_a_number_that_was_given_to_another(family: Tasks) -> None:
    """Out and in again: the home is a new one, of which nothing is known."""
    before = family.home_at(1, 2)
    before.mnt_ns_id = 77
    family.entered(1, THERE, 3)
    family.entered(1, HERE, 4)
    assert lives(family, 1) == HERE
    assert family.home_at(1, 5) is not before
    assert not family.home_at(1, 5).is_known


def test_a_mapping_told_after_the_move_it_was_before(family: Tasks) -> None:
    family.entered(1, THERE, 10)
    assert (lives(family, 1, 9), lives(family, 1, 10)) == (HERE, THERE)
    family.forked(2, 1, 9)  # told late as well
    assert lives(family, 2) == HERE


def test_who_has_ended_is_known_for_a_moment(family: Tasks) -> None:
    family.forked(2, 1, 2)
    family.exited(2, 3, 3)
    assert lives(family, 2) == HERE
    family.tidy(3 + SECOND, 9)
    assert len(family) == 2
    family.tidy(4 + SECOND, 9)
    assert len(family) == 1


def test_who_ended_long_ago_is_known_for_a_moment_after_it_was_told(family: Tasks) -> None:
    """The catcher may have been stopped in between, with mappings left to look at."""
    family.forked(2, 1, 2)
    family.forked(3, 1, 2)
    family.exited(2, 3, 5 * SECOND)
    family.exited(3, 4 * SECOND, 5 * SECOND)
    assert lives(family, 2) == HERE
    family.tidy(6 * SECOND + 1, 9)
    assert len(family) == 1


def test_few_ended_processes_are_forgotten_at_a_time(family: Tasks) -> None:
    """All mappings wait meanwhile."""
    for pid in range(10, 100):
        family.forked(pid, 1, 2)
    for pid in range(10, 60):
        family.exited(pid, 3, 3)
    family.tidy(10 * SECOND, 20)
    assert len(family) == 91 - 20
    family.exited(60, 4, 10 * SECOND)
    assert len(family) == 91 - 22


def test_a_process_number_that_is_used_again(family: Tasks) -> None:
    family.forked(2, 1, 2)
    family.exited(2, 3, 3)
    family.forked(4, 1, 4)
    family.entered(4, THERE, 4)
    family.forked(2, 4, 5)
    assert (lives(family, 2, 2), lives(family, 2, 6)) == (HERE, THERE)
    family.tidy(10 * SECOND, 9)  # of the end of the first one
    assert lives(family, 2) == THERE


def test_what_was_lost_may_have_been_anything(family: Tasks) -> None:
    family.forked(2, 99, 2)
    family.forget()
    assert len(family) == 0
    assert not family.has_strangers
    assert lives(family, 1) is None


def test_the_parent_is_a_neighbour_for_ever(family: Tasks) -> None:
    for child in range(100, 200):
        family.forked(child, 1, child)
        family.exited(child, child, child)
    assert 1 in family.home_at(1, 300).pids
    assert len(family.home_at(1, 300).pids) <= 4


def test_strangers_are_told_once() -> None:
    family = Tasks()
    family.forked(2, 1, 5)
    assert family.has_strangers
    ((pid, home),) = family.strangers()
    assert pid == 1
    assert home is family.home_at(2, 6)
    assert not family.has_strangers
    assert family.strangers() == []


def test_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_table, "_MOST_PROCESSES", 100)
    family = Tasks()
    for pid in range(1000):
        family.forked(pid + 1, pid, pid)
        assert len(family) <= 101
    # Whoever has ended and was told so early or late.
    for pid in range(1000):
        family.exited(pid, pid + 10_000, pid + 10_000)
    family.tidy(10 * SECOND, 9)
    assert len(family) <= 101


def test_looking_at_a_process() -> None:
    home = Home()
    assert process_table.look(os.getpid(), home) is home
    pid_fd = procfs.open_pid(os.getpid())
    try:
        assert home.namespaces == own_namespaces()
        assert home.mnt_ns_id == (namespaces.mnt_ns_id(pid_fd) or own_namespaces().mnt)
        assert home.cgroup == cgroup.path(procfs.cgroup(pid_fd))
    finally:
        os.close(pid_fd)
    assert home.is_known


def test_looking_at_one_that_is_gone() -> None:
    home = Home(HERE)
    assert process_table.look(GONE, home) is home
    assert not home.is_known


def test_one_that_has_moved_on_does_not_take_the_others_along() -> None:
    """Its home was told to be another one than the one it is found in."""
    home = Home(HERE)
    found = process_table.look(os.getpid(), home)
    assert found is not home
    assert found.namespaces == own_namespaces()
    assert not home.is_known


@pytest.mark.root
@needs_root("mounts in a namespace of its own")
def test_a_namespace_is_closed_by_whoever_is_told_to(tmp_path: Path) -> None:
    closed: list[int] = []
    with private_cat(tmp_path) as child:
        home = process_table.look(child.pid, Home(), closed.append)
        (fd,) = closed
        assert os.fstat(fd).st_ino == home.namespaces.mnt if home.namespaces else False
        os.close(fd)
        pid_fd = procfs.open_pid(child.pid)
        try:
            assert home.mnt_ns_id == namespaces.mnt_ns_id(pid_fd)
        finally:
            os.close(pid_fd)


def test_the_place_of_a_process() -> None:
    home = process_table.look(os.getpid(), Home())
    place = process_table.place(os.getpid(), home, own_namespaces().mnt)
    assert (place.namespaces, place.mnt_ns_id) == (home.namespaces, home.mnt_ns_id)
    assert (place.cgroup, place.chrooted) == (home.cgroup, False)


def test_the_place_of_one_that_is_gone() -> None:
    """Whatever is known of its home; and that it was in no chroot is not."""
    home = Home(HERE)
    home.cgroup = b"/of/its/home"
    place = process_table.place(GONE, home, HERE.mnt)
    assert (place.namespaces, place.cgroup, place.chrooted) == (HERE, b"/of/its/home", True)
    assert process_table.place(GONE, Home(), HERE.mnt).namespaces == NamespaceSet()


@pytest.mark.root
@needs_root("changes the root")
def test_a_root_that_is_that_of_all_is_no_chroot() -> None:
    with running([tool("unshare"), "--root", "/", "--wd", "/", cat_program()]) as child:
        home = process_table.look(child.pid, Home())
        assert not process_table.place(child.pid, home, home.mnt_ns_id).chrooted
