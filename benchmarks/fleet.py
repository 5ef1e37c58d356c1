# SPDX-License-Identifier: Apache-2.0
"""Replay a day of a large fleet on one bucket, and check the claims of docs/fleet.md.

    python -m benchmarks.fleet [--hosts N] [--ids N] [--json] ...

The filter is that of the program: fingerprints are built, merged and looked up for real at a scale
of ``--scale`` build IDs, and its rate of false answers is multiplied up. Generations of the filter
are replayed push by push with the rule of the program on the sizes of runs. All else is counting:
the number of look-ups, pushes and touches of a day, the requests that each of them makes, and what
a provider charges. Exit status 1 if a claim does not hold.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from typing import NamedTuple

from buildidfs.fleet.filters import Run, _hash
from buildidfs.model import Kind

DAY = 86_400
_FINGERPRINT = 4
_GENERATION_BYTES = 1000

# US dollars: for a million requests, and a month of a GB. List prices of AWS, us-east-1.
GET, PUT, STORED = 0.4, 5.0, 0.023


class Fleet(NamedTuple):
    """A fleet and its day."""

    hosts: int = 100_000
    ids: int = 50_000_000
    bytes: float = 200e12
    new_ids: int = 100_000
    """Build IDs that no host had before."""
    resighted: int = 20
    """Build IDs of other hosts that a host sees for the first time."""
    lookups: int = 50_000
    """Look-ups of readers on each host that its store does not answer."""
    absent: float = 0.98
    """The share of these look-ups that are for files that no host has."""
    refresh_s: int = 600
    keep_days: int = 90
    scale: int = 200_000


class Claim(NamedTuple):
    """A statement of docs/fleet.md with its measure and its bar."""

    name: str
    value: float
    bar: float
    unit: str
    at_least: bool = False

    @property
    def holds(self) -> bool:
        """True if the bar is met."""
        return self.value >= self.bar if self.at_least else self.value <= self.bar


class Filter(NamedTuple):
    """What was measured of the filter."""

    false_rate: float
    lookup_us: float
    build_s: float


def measured_filter(fleet: Fleet, rng: random.Random) -> Filter:
    """Build a real filter of ``scale`` members, and look up as many absent ones."""
    began = time.perf_counter()
    members = sorted(_hash(rng.randbytes(20), Kind.EXECUTABLE) for _ in range(fleet.scale))
    run = Run.of(members)
    build_s = time.perf_counter() - began
    absent = [_hash(rng.randbytes(20), Kind.DEBUGINFO) for _ in range(fleet.scale)]
    began = time.perf_counter()
    hits = sum(run.has(each >> 32, each & 0xFFFFFFFF) for each in absent)
    lookup_us = (time.perf_counter() - began) / fleet.scale * 1e6
    # A fingerprint has 40 bits; a few hits at this scale are too few to measure a rate by.
    expected = fleet.scale / 2**40
    limit = 5 + 3 * fleet.scale * expected
    assert hits <= limit, f"{hits} false answers of {fleet.scale}, and not {limit:.0f}"
    return Filter(2 * fleet.ids / 2**40, lookup_us, build_s * 2 * fleet.ids / fleet.scale)


class Generations(NamedTuple):
    """A day of the filter: how often it changed, what was written, and what one reader loads."""

    count: int
    written: int
    loaded: int
    loads: int
    most_runs: int


def replayed_generations(fleet: Fleet, rng: random.Random) -> Generations:
    """Replay the pushes of new build IDs, which come in groups: a release has many files."""
    runs = [2 * fleet.ids]
    names = [0]
    named = count = written = loaded = loads = 0
    most = 1
    held: set[int] = {0}
    left = 2 * fleet.new_ids
    moments = []
    while left > 0:
        size = min(left, 1 + int(rng.expovariate(1 / 40)))
        left -= size
        moments.append((rng.uniform(0, DAY), size))
    due = float(fleet.refresh_s)
    for moment, size in [*sorted(moments), (float(DAY), 0)]:
        while due <= moment:
            new = set(names) - held
            loaded += sum(runs[names.index(each)] for each in new) * _FINGERPRINT
            loads += len(new)
            held = set(names)
            due += fleet.refresh_s
        if not size:
            continue
        while runs and runs[-1] < 2 * size:
            size += runs.pop()
            names.pop()
        named += 1
        runs.append(size)
        names.append(named)
        count += 1
        written += size * _FINGERPRINT + _GENERATION_BYTES
        most = max(most, len(runs))
    return Generations(count, written, loaded, loads, most)


class Requests(NamedTuple):
    """Requests of a day, by what they cost."""

    reads: float
    writes: float

    def dollars(self) -> float:
        """The price."""
        return (self.reads * GET + self.writes * PUT) / 1e6


def requests_of(fleet: Fleet, found: Filter, day: Generations) -> dict[str, Requests]:
    """Count the requests of a day by their reason."""
    lookups = fleet.hosts * fleet.lookups
    absent = lookups * fleet.absent
    present = lookups - absent
    # A host keeps what it has read: each of its files is looked up in the bucket once or twice.
    first = min(present, fleet.hosts * fleet.resighted * 4)
    touched = fleet.ids / (fleet.keep_days / 2)
    return {
        "look-ups of absent files": Requests(absent * found.false_rate, 0),
        "reads of files": Requests(first * 8, 0),
        "refresh of the filter": Requests(fleet.hosts * (2 * DAY / fleet.refresh_s + day.loads), 0),
        "pushes of new files": Requests(0, 2 * fleet.new_ids * 1.1),
        "files that other hosts pushed": Requests(fleet.hosts * fleet.resighted * 2, 0),
        "changes of the filter": Requests(day.count * 8, day.count * 3),
        "manifests": Requests(fleet.hosts * 24, fleet.hosts * 24),
        "touches": Requests(touched, 2 * touched),
    }


def claims_of(
    fleet: Fleet, found: Filter, day: Generations, requests: dict[str, Requests]
) -> list[Claim]:
    """The claims of docs/fleet.md."""
    reads = sum(each.reads for each in requests.values())
    writes = sum(each.writes for each in requests.values())
    dollars = sum(each.dollars() for each in requests.values())
    storage = fleet.bytes / 1e9 * STORED / 30
    lookups = fleet.hosts * fleet.lookups
    bucket = sum(requests[name].reads for name in ("look-ups of absent files", "reads of files"))
    return [
        Claim("absent look-ups without a request", 1 - found.false_rate, 0.99, "", at_least=True),
        Claim("look-ups that reach the bucket", bucket / lookups, 0.05, ""),
        Claim("reads of the bucket", reads / DAY, 5500, "/s"),
        Claim("writes of the bucket", writes / DAY, 3500, "/s"),
        Claim("filter in the memory of a reader", 2 * fleet.ids * _FINGERPRINT / 1e6, 450, "MB"),
        Claim("filter that a reader loads a day", day.loaded / 1e6, 32, "MB"),
        Claim("look-up in the filter, for each run", found.lookup_us, 20, "us"),
        Claim("runs of the filter", day.most_runs, math.log2(4 * fleet.ids), ""),
        Claim("filter built anew, on one CPU", found.build_s, 900, "s"),
        Claim("listing of the bucket for that", 2 * fleet.ids / 1000 * PUT / 1e6, 2, "$"),
        Claim("requests of a day", dollars, 300, "$"),
        Claim("storage of a day", storage, 200, "$"),
    ]


def main(arguments: list[str] | None = None) -> int:
    """Replay, print, and check."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    for name, default in Fleet._field_defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    given = vars(parser.parse_args(arguments))
    as_json, rng = given.pop("json"), random.Random(given.pop("seed"))
    fleet = Fleet(**given)
    found, day = measured_filter(fleet, rng), replayed_generations(fleet, rng)
    requests = requests_of(fleet, found, day)
    claims = claims_of(fleet, found, day, requests)
    if as_json:
        rows = [{**claim._asdict(), "holds": claim.holds} for claim in claims]
        print(json.dumps({"fleet": fleet._asdict(), "claims": rows}))
        return 0 if all(claim.holds for claim in claims) else 1
    print(f"{fleet.hosts} hosts, {fleet.ids} build IDs, {fleet.bytes / 1e12:g} TB\n")
    print(f"{'requests of a day':34} {'reads':>14} {'writes':>12} {'$':>8}")
    for name, each in requests.items():
        print(f"{name:34} {each.reads:14,.0f} {each.writes:12,.0f} {each.dollars():8.2f}")
    print(f"\nfilter: {day.count} generations, {day.written / 1e6:.0f} MB written\n")
    for claim in claims:
        sign = ">=" if claim.at_least else "<="
        mark = "ok" if claim.holds else "MISSED"
        value = f"{claim.value:.6g}{claim.unit} {sign} {claim.bar:g}{claim.unit}"
        print(f"{claim.name:38} {value:32} {mark}")
    return 0 if all(claim.holds for claim in claims) else 1


if __name__ == "__main__":
    sys.exit(main())
