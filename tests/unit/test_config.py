# SPDX-License-Identifier: Apache-2.0
"""Settings: what a file may say, and how a mistake in it is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from buildidfs import config
from buildidfs.errors import UsageError


def test_defaults_are_those_of_an_empty_file() -> None:
    assert config.parse("", "x.toml") == config.Settings()


def test_every_key() -> None:
    settings = config.parse(
        """
        [store]
        path = "/srv/buildids"
        [container]
        namespaces = ["pid", "uts"]
        [mount]
        options = ["noallow_other"]
        gdb-scripts = "keep"
        """,
        "x.toml",
    )
    assert settings.store.path == "/srv/buildids"
    assert settings.container.namespaces == ("pid", "uts")
    assert settings.mount.options == ("noallow_other",)
    assert settings.mount.gdb_scripts == "keep"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[store]\npaht = '/x'", "paht"),
        ("[container]\nnamespaces = ['mount']", "mount"),
        ("[container]\nnamespaces = []", "names no namespace"),
        ("[mount]\ngdb-scripts = true", "gdb-scripts"),
        ("[store", "not valid TOML"),
    ],
)
def test_mistakes_are_named(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        config.parse(text, "x.toml")
    assert str(caught.value).startswith("x.toml: ")
    assert "\n" not in str(caught.value)


def test_unreadable_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        config.load(tmp_path / "none.toml")
    bad = tmp_path / "bad.toml"
    bad.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="not UTF-8"):
        config.load(bad)
