# SPDX-License-Identifier: Apache-2.0
"""Each decoder keeps its promises and bounds for any input.

The promises are in `tests.fuzz.targets`; ``make fuzz`` does the same for longer.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz import elf_mutation
from tests.fuzz.bounds import Cost, costs
from tests.fuzz.targets import TARGETS

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT / "tests/fuzz/corpus"


def test_every_format_is_a_target() -> None:
    covered = {module for target in TARGETS.values() for module in target.modules}
    formats = ROOT / "buildidfs/formats"
    modules = {
        ".".join(path.relative_to(formats).with_suffix("").parts)
        for path in formats.rglob("*.py")
        if path.stem != "__init__"
    }
    assert modules - covered == set(), "add them to TARGETS in tests/fuzz/decoders.py"
    assert covered - modules == set()


def test_corpus_is_small_and_of_targets() -> None:
    assert {path.name for path in CORPUS.iterdir()} <= TARGETS.keys()
    for directory in CORPUS.iterdir():
        files = list(directory.iterdir())
        assert 0 < len(files) <= 48, directory
        assert all(path.stat().st_size < 4096 for path in files), directory


@pytest.mark.parametrize("name", TARGETS)
def test_corpus(name: str) -> None:
    target = TARGETS[name]
    for data in (b"", *target.seeds()):
        target.check(data)
    if (CORPUS / name).is_dir():
        for path in sorted((CORPUS / name).iterdir()):
            target.check(path.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_any_bytes(name: str) -> None:
    @settings(max_examples=20, deadline=None)
    @given(st.binary(max_size=1000))
    def check(data: bytes) -> None:
        TARGETS[name].check(data)

    check()


@pytest.mark.parametrize("name", TARGETS)
def test_good_inputs_gone_bad(name: str) -> None:
    target = TARGETS[name]
    good = list(target.seeds())

    @settings(max_examples=50, deadline=None)
    @given(st.sampled_from(good), st.integers(0, 2**64 - 1))
    def check(data: bytes, chosen: int) -> None:
        target.check(elf_mutation.mutated(data, random.Random(chosen)))

    check()


@pytest.fixture(scope="module")
def measured() -> dict[str, list[Cost]]:
    """Costs of the worst inputs of each target: some seconds for all of them."""
    return costs()


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_worst_inputs_are_bounded(name: str, measured: dict[str, list[Cost]]) -> None:
    """In processor time, which others on this machine do not change much, and in memory."""
    target = TARGETS[name]
    assert measured[name]
    for number, cost in enumerate(measured[name]):
        assert not cost.fault, number
        assert cost.seconds < target.seconds, number
        assert cost.memory < target.bytes, number
