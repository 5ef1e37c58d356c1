# SPDX-License-Identifier: Apache-2.0
"""A failed test leaves no process and no open pipe to the tests that follow."""

from __future__ import annotations

import subprocess

import pytest

from tests import conftest
from tests.support.harness import children
from tests.support.harness.children import cat_program, running


def test_children_of_a_failed_test_end_and_those_of_fixtures_stay() -> None:
    with running([cat_program()]) as earlier:
        call = conftest.pytest_runtest_call()
        next(call)
        later = subprocess.Popen([cat_program()], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        ended = subprocess.Popen([cat_program()], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        ended.wait(30)
        assert {earlier.pid, later.pid} <= children.pids()
        with pytest.raises(ValueError, match="failed"):
            call.throw(ValueError("failed"))
        assert earlier.poll() is None
        assert later.returncode is not None
        for stream in (later.stdin, later.stdout, ended.stdout):
            assert stream is not None
            assert stream.closed
        assert later.pid not in children.pids()


def test_children_of_a_passing_test_are_its_own() -> None:
    call = conftest.pytest_runtest_call()
    next(call)
    with running([cat_program()]) as child:
        with pytest.raises(StopIteration):
            next(call)
        assert child.poll() is None
