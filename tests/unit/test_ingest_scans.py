# SPDX-License-Identifier: Apache-2.0
"""buildidfs.ingest.scans: the operator's rules decide, the first that fits."""

from __future__ import annotations

from pathlib import Path

import pytest

from buildidfs import config
from buildidfs.errors import UsageError
from buildidfs.ingest import scans as capturing
from buildidfs.ingest.scans import trust_of
from buildidfs.model import Kind, Standing, Trust
from buildidfs.store import Store
from tests.support.harness.captures import NOW, SECOND, capture, identity, sighting


def _settings(text: str) -> config.Settings:
    return config.parse(text, "test")


RULES = _settings(
    """
[[trust.rules]]
path = "/opt/hostile/*"
level = "unknown"
[[trust.rules]]
path = "/opt/*"
container = ""
level = "host"
[[trust.rules]]
container = "docker:ab*"
level = "package"
"""
)


@pytest.mark.parametrize(
    ("path", "container", "trust"),
    [
        (b"/opt/a/b", "", Trust.HOST),
        (b"/opt/hostile/x", "", Trust.UNKNOWN),
        (b"/opt/hostile/x", "docker:abc", Trust.UNKNOWN),
        (b"/opt/a", "docker:abc", Trust.PACKAGE),
        (b"/opt/\xff\n", "", Trust.HOST),
        (b"/optional", "", Trust.CONTAINER),
        (b"/usr/bin/a", "docker:cd", Trust.CONTAINER),
        (b"/usr/bin/a", "", Trust.CONTAINER),
    ],
)
def test_the_first_that_fits(path: bytes, container: str, trust: Trust) -> None:
    origin = sighting(path, container=container, trust=Trust.CONTAINER).origin
    assert trust_of(RULES.trust.rules)(origin) == (trust, Standing.GIVEN)


def test_what_is_captured_and_seen_again(tmp_path: Path) -> None:
    with Store.create(tmp_path / "store") as store:
        capturing.believe(store, RULES)
        at = sighting(b"/opt/app", trust=Trust.CONTAINER)
        store.commit([capture(store, b"bytes", at=at)])
        artifact = store.index.artifact(1, Kind.EXECUTABLE)
        assert artifact is not None
        assert artifact.trust is Trust.HOST
        assert store.index.origins(1)[0].origin.trust is Trust.HOST

        other = sighting(b"/usr/other", trust=Trust.CONTAINER)
        store.commit([capture(store, b"others", b"\x05\x05", at=other)])
        again = sighting(
            b"/usr/other", trust=Trust.CONTAINER, container="docker:ab", seen_ns=NOW + SECOND
        )
        assert store.index.recall(identity()) is not None
        assert store.touch([again]) == []
        artifact = store.index.artifact(2, Kind.EXECUTABLE)
        assert artifact is not None
        assert artifact.trust is Trust.PACKAGE
        unknown = sighting(b"/opt/unknown", ino=77)
        assert store.touch([unknown]) == [unknown]


def test_without_rules_nothing_is_judged(tmp_path: Path) -> None:
    with Store.create(tmp_path / "store") as store:
        capturing.believe(store, config.Settings())
        assert store._judge is None


@pytest.mark.parametrize(
    "text",
    [
        "[[trust.rules]]\nlevel = 'root'",
        "[[trust.rules]]\npath = '/x'",
        "[[trust.rules]]\nlevel = 'host'\nhost = 'x'",
        "[trust]\nrules = 1",
    ],
)
def test_rules_that_make_no_sense(text: str) -> None:
    with pytest.raises(UsageError, match=r"rules"):
        _settings(text)
