# SPDX-License-Identifier: Apache-2.0
"""buildidfs.watch.metrics: what Prometheus gets, over HTTP and in a file."""

from __future__ import annotations

import os
import re
import socket
import sys
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from buildidfs.capture.live.protocol import Counts
from buildidfs.config import Settings
from buildidfs.errors import UsageError
from buildidfs.ingest.committer import WatchCounters
from buildidfs.store import Store
from buildidfs.store.run_files import Presence
from buildidfs.watch import metrics
from buildidfs.watch.metrics import Exporter, MetricsTarget
from buildidfs.watch.state import LossCount, WatchState
from tests.support.clients.commands import ROOT
from tests.support.clients.manuals import formatted
from tests.support.harness.captures import capture
from tests.support.harness.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

STATE = WatchState(
    "following", ("half blind",), Counts(records=7, lost=3), WatchCounters(captured=5,
    copied_bytes=50), 2, 20, 1, 4, False, lag_s=1.5,
)  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.create(tmp_path / "store") as store:
        store.commit([capture(store, b"content")])
        yield store


@pytest.fixture(autouse=True)
def no_coverage(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of the host are not the subject."""
    monkeypatch.setattr(Exporter, "_keep_looking", lambda self: None)


def exporter(
    store: Store, *, place: MetricsTarget | None = None, state: WatchState = STATE
) -> Exporter:
    return Exporter(place or MetricsTarget("", "127.0.0.1", 0), store, Settings(), lambda: state)


def values(text: bytes) -> dict[str, float]:
    """The samples of a text, by name and labels."""
    return {
        sample.name
        + "".join(f"{{{k}={v}}}" for k, v in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def fetched(source: Exporter, path: str = "/metrics", **options: Any) -> bytes:
    host, port = source.address
    request = urllib.request.Request(f"http://{host}:{port}{path}", **options)
    with urllib.request.urlopen(request, timeout=30) as answer:
        body: bytes = answer.read()
        return body


def test_values_over_http(store: Store) -> None:
    mount = Presence(store.path, "mount", mountpoint=b"/buildid", requests=77)
    with mount, exporter(store) as source:
        found = values(fetched(source))
    assert found["buildidfs_captured_files_total"] == 5
    assert found["buildidfs_captured_bytes_total"] == 50
    assert found["buildidfs_lost_kernel_events_total"] == 3
    assert found["buildidfs_gaps_total"] == 4
    assert found["buildidfs_waiting_files"] == 2
    assert found["buildidfs_lag_seconds"] == 1.5
    assert found["buildidfs_watch_mode{mode=following}"] == 1
    assert found["buildidfs_watch_mode{mode=interrupted}"] == 0
    assert found["buildidfs_store_blobs"] == 1
    assert found["buildidfs_store_content_bytes"] == len(b"content")
    assert found["buildidfs_store_free_inodes"] > 0
    assert found["buildidfs_evicted_blobs_total{recapturable=false}"] == 0
    assert found["buildidfs_mount_requests_total{mountpoint=/buildid}"] == 77


def test_lost_files_by_reason_never_become_fewer(store: Store) -> None:
    losses = [LossCount(f"reason {n}", f"c{n}", 0, 1, n) for n in range(200)]
    state = replace(STATE, losses=tuple(losses))
    source = Exporter(MetricsTarget("", "127.0.0.1", 0), store, Settings(), lambda: state)
    with source:
        before = values(fetched(source))
        # The latest loss comes first.
        state.losses = (LossCount("new", "c", 0, 5, 999), *reversed(losses))
        until(lambda: values(fetched(source)) != before, "newer values")
        after = values(fetched(source))
    lost = {name: value for name, value in before.items() if "lost_files" in name}
    assert sum(lost.values()) == 200
    assert len(lost) == 65
    assert {name for name, value in lost.items() if after[name] < value} == set()
    assert sum(value for name, value in after.items() if "lost_files" in name) == 205


def test_names_are_those_of_the_manual(store: Store) -> None:
    with exporter(store) as source:
        families = list(text_string_to_metric_families(fetched(source).decode()))
    page = formatted(ROOT / "man/buildidfs.1").out.partition("\nMETRICS\n")[2]
    section = page.partition("\nPRIVILEGES\n")[0]
    for family in families:
        name = family.name + ("_total" if family.type == "counter" else "")
        assert re.search(rf"\b{name}\b", section), name
        assert re.fullmatch(r"buildidfs_[a-z_]+", name)
        assert family.documentation.endswith(".")
    named = set(re.findall(r"\bbuildidfs_[a-z_]+", section))
    given = {each.name + "_total" * (each.type == "counter") for each in families}
    assert named == given | {"buildidfs_coverage_ratio"}


def test_other_requests_are_refused(store: Store) -> None:
    with exporter(store) as source:
        for path, options, code in (("/", {}, 404), ("/metrics", {"method": "PUT"}, 405)):
            with pytest.raises(urllib.error.HTTPError) as refused:
                fetched(source, path, **options)
            assert refused.value.code == code
            refused.value.close()
        assert fetched(source, method="HEAD") == b""
        assert fetched(source, "/metrics?x=1")


def test_page_of_the_web_reads_nothing_by_its_own_name(store: Store) -> None:
    with exporter(store) as source:
        with pytest.raises(urllib.error.HTTPError) as refused:
            fetched(source, headers={"Host": "rebound.example:9100"})
        assert refused.value.code == 421
        refused.value.close()
        assert fetched(source, headers={"Host": "localhost:9100"})


def test_flood_of_requests_collects_once_a_second(store: Store) -> None:
    calls = []

    def state() -> WatchState:
        calls.append(time.monotonic())
        return STATE

    with Exporter(MetricsTarget("", "127.0.0.1", 0), store, Settings(), state) as source:
        began = time.monotonic()
        for _ in range(50):
            fetched(source)
        seconds = time.monotonic() - began
    assert len(calls) <= seconds + 1


def test_file_is_whole_readable_and_gone_at_the_end(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "_FILE_S", 0.01)
    monkeypatch.setattr(metrics, "_FRESH_S", 0.0)
    directory = tmp_path / "textfile"
    directory.mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("precious")
    file = directory / "buildidfs.prom"
    file.symlink_to(elsewhere)
    with exporter(store, place=MetricsTarget(path=str(file))):
        assert not file.is_symlink()
        assert file.stat().st_mode & 0o777 == 0o644
        first = file.stat().st_ino
        until(lambda: file.stat().st_ino != first, "a second file")
        for _ in range(100):
            assert values(file.read_bytes())["buildidfs_captured_files_total"] == 5
    assert os.listdir(directory) == []
    assert elsewhere.read_text() == "precious"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/run/x.prom", MetricsTarget(path="/run/x.prom")),
        ("127.0.0.1:9481", MetricsTarget("", "127.0.0.1", 9481)),
        ("[::1]:9481", MetricsTarget("", "::1", 9481)),
        ("0.0.0.0:80", MetricsTarget("", "0.0.0.0", 80)),
        ("localhost:9481", MetricsTarget("", "localhost", 9481)),
        ("9481", MetricsTarget("", "127.0.0.1", 9481)),
        (":9481", MetricsTarget("", "127.0.0.1", 9481)),
    ],
)
def test_targets(text: str, expected: MetricsTarget) -> None:
    assert metrics.target(text) == expected


@pytest.mark.parametrize("text", ["", "x", "host.example:1", "127.0.0.1", "1:2:3", ":0", ":99999"])
def test_what_is_no_target(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--metrics "):
        metrics.target(text)


def test_address_that_is_taken_is_named(store: Store) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=rf"127\.0\.0\.1 port {port}: Address already in use$"):
            exporter(store, place=MetricsTarget("", "127.0.0.1", port))


def test_file_that_cannot_be_written_is_named(store: Store, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot write .*/none/x.prom: No such file"):
        exporter(store, place=MetricsTarget(path=str(tmp_path / "none" / "x.prom")))


def test_missing_library_is_named(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(UsageError, match="needs the Python package prometheus-client: pip install"):
        exporter(store)
