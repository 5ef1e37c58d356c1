# SPDX-License-Identifier: Apache-2.0
"""Settings: what a file may say, and how a mistake in it is told."""

from __future__ import annotations

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
        [watch]
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
    assert settings.watch == config.WatchSettings(5, "1GiB", ("/tmp/*",))
    assert settings.up.mountpoint == "/srv/ids"


@pytest.mark.parametrize(
    ("text", "number"),
    [(7, 7), ("100", 100), ("512MiB", 512 << 20), ("2G", 2 << 30), ("1.5 GB", 1_500_000_000)],
)
def test_sizes(text: int | str, number: int) -> None:
    assert config.size(text) == number


@pytest.mark.parametrize("text", ["", "two", "5 parsecs", "-1", "1e9", "9" * 400])
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
        ("[watch]\npin-seconds = 0", "pin-seconds"),
        ("[stroe]\npath = '/x'", r"unknown section \[stroe\]; did you mean \[store\]\?$"),
        ("path = '/x'", r"unknown key path outside of a section; it belongs into \[store\]$"),
        ("[mount]\nmax-size = 1", r"in \[mount\]; it belongs into \[retention\]$"),
        ("[mount]\nlist-all = 'no'", "mount.list-all: it has to be true or false, not text$"),
        (
            "[mount]\ngdb-scripts = 'no'",
            "mount.gdb-scripts: no such value: 'no'; there are zero, keep$",
        ),
        ("[[trust.rules]]\nlvl = 'host'", r"in \[\[trust.rules\]\]; did you mean level\?$"),
        ("[[trust.rules]]\npath = '/x'", r"trust.rules\[0\]: it lacks the key level$"),
        ("[remote]\nurl = 's3://a'\nprivate = 's3://a/'", "remote.private: .* another bucket$"),
        ("store = 1", "store: it has to be a section, not a number$"),
        (
            "[watch]\nstrict = true",
            r"^x.toml: unknown key strict in \[watch\]; there are pin-seconds, ",
        ),
    ],
)
def test_mistakes_are_named(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        config.parse(text, "x.toml")
    assert str(caught.value).startswith("x.toml: ")
    assert "\n" not in str(caught.value)


def test_value_without_quotes_is_shown_with_them() -> None:
    for line, quoted in (
        ("max-size = 50G", 'max-size = "50G"'),
        ("  max-age = 30d  # a month", 'max-age = "30d"'),
        ("keep-free=10%", 'keep-free = "10%"'),
        ("max-size = much", 'max-size = "much"'),
    ):
        with pytest.raises(UsageError) as caught:
            config.parse(f"[retention]\n{line}\n", "x.toml")
        assert str(caught.value).endswith(f"; quote it: {quoted}"), line
    for text in ('[store]\nx = "a', "[store\n", "x = [1\n", "x = {a = 1\n", "x =\n"):
        with pytest.raises(UsageError) as caught:
            config.parse(text, "x.toml")
        assert "quote it" not in str(caught.value), text


@pytest.mark.parametrize(
    "text", ["a = " + "[" * 5000, "a = " + "{a = " * 5000, "a = " + "9" * 5000]
)
def test_what_no_reader_of_toml_can_take_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="not valid TOML"):
        config.parse(text, "x.toml")


# --- retention -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, (0, 0.0)),
        (4096, (4096, 0.0)),
        ("50G", (50 << 30, 0.0)),
        ("1.5 MB", (1_500_000, 0.0)),
        ("80%", (0, 0.8)),
        ("2.5 %", (0, 0.025)),
        ("100%", (0, 1.0)),
    ],
)
def test_limits(value: int | str, expected: tuple[int, float]) -> None:
    assert config.limit(value) == pytest.approx(expected)


@pytest.mark.parametrize(
    "value", ["", "101%", "%", "-5", -5, "-5%", "5 percent", "G", "1e9", "9%9"]
)
def test_what_is_no_limit(value: int | str) -> None:
    with pytest.raises(UsageError, match=r"not a s(ize|hare)"):
        config.limit(value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, 0),
        (90, 90),
        ("0", 0),
        ("90s", 90),
        ("1.5h", 5400),
        ("30 d", 30 * 86_400),
        ("2W", 14 * 86_400),
        ("5m", 300),
    ],
)
def test_ages(value: int | str, expected: int) -> None:
    assert config.seconds(value) == expected


@pytest.mark.parametrize("value", ["", "-1d", -1, "d", "1y", "1d2h", "9" * 40])
def test_what_is_no_age(value: int | str) -> None:
    with pytest.raises(UsageError, match="not an age"):
        config.seconds(value)


@pytest.mark.parametrize("value", ["3", "90", " 1.5 "])
def test_text_of_an_age_needs_a_unit(value: str) -> None:
    with pytest.raises(UsageError, match=f"needs a unit: '{value.strip()}'; try {value.strip()}d"):
        config.seconds(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('max-size = "lots"', "the file: retention.max-size: not a size"),
        ('keep-free = "120%"', "the file: retention.keep-free: not a share of the filesystem"),
        ("max-age = -1", "the file: retention.max-age: not an age"),
        ('min-age = "soon"', "the file: retention.min-age: not an age"),
        ('compress-after = "now"', "the file: retention.compress-after: not an age"),
        (
            "max-size = true",
            "the file: retention.max-size: it has to be a number or text, not true or false",
        ),
        (
            "maxsize = 1",
            r"the file: unknown key maxsize in \[retention\]; did you mean max-size\?$",
        ),
    ],
)
def test_retention_that_makes_no_sense_names_the_key(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        config.parse(f"[retention]\n{text}\n", "the file")


def test_retention_settings() -> None:
    text = '[retention]\nmax-size = "80%"\nkeep-free = 0\nmax-age = "90d"\nmin-age = "12h"\n'
    kept = config.parse(text, "the file").retention
    assert (kept.max_size, kept.keep_free, kept.max_age, kept.min_age) == ("80%", 0, "90d", "12h")
    assert config.Settings().retention.max_size is None
