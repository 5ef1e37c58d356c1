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
        [capture]
        fuse-as-owner = true
        [watch]
        strict = true
        exec-wait = 0.5
        pin-seconds = 5
        pin-bytes = "1GiB"
        exclude = ["/tmp/*"]
        [up]
        mountpoint = "/srv/ids"
        """,
        "x.toml",
    )
    assert settings.store.path == "/srv/buildids"
    assert settings.container.namespaces == ("pid", "uts")
    assert settings.mount.options == ("noallow_other",)
    assert settings.mount.gdb_scripts == "keep"
    assert settings.capture.fuse_as_owner
    assert settings.watch == config.WatchSettings(True, 0.5, 5, "1GiB", ("/tmp/*",))
    assert settings.up.mountpoint == "/srv/ids"


@pytest.mark.parametrize(
    ("text", "number"),
    [(7, 7), ("100", 100), ("512MiB", 512 << 20), ("2G", 2 << 30), ("1.5 GB", 1_500_000_000)],
)
def test_sizes(text: int | str, number: int) -> None:
    assert config.size(text) == number


@pytest.mark.parametrize("text", ["", "two", "5 parsecs", "-1", "1e9"])
def test_what_is_not_a_size_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="not a size"):
        config.size(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[store]\npaht = '/x'", "paht"),
        ("[container]\nnamespaces = ['mount']", "mount"),
        ("[container]\nnamespaces = []", "names no namespace"),
        ("[mount]\ngdb-scripts = true", "gdb-scripts"),
        ("[store", "not valid TOML"),
        ("[watch]\npin-bytes = 'much'", "watch.pin-bytes: not a size"),
        ("[watch]\nexec-wait = 60", "exec-wait"),
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
