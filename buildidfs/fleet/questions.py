# SPDX-License-Identifier: Apache-2.0
"""Questions about all hosts that push to a bucket, answered from their manifests.

No host has to run, and the caller needs no store. Manifests of other hosts are claims and contain
untrusted text.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import time
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from buildidfs.errors import (
    ArtifactMissing,
    InvalidBuildId,
    RemoteDamaged,
    UsageError,
)
from buildidfs.fleet import manifests, objects
from buildidfs.fleet.bucket import Bucket
from buildidfs.fleet.filters import Filter
from buildidfs.fleet.manifests import PRIVATE, PUSHED, VARIANT
from buildidfs.fleet.objects import NO_BUCKET
from buildidfs.model import BuildId, Kind, fingerprint
from buildidfs.wording import glob, only

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from buildidfs.config import RemoteSettings

_log = logging.getLogger(__name__)

_HEX: Final = re.compile(r"[0-9a-fA-F]{4,240}")
_KINDS: Final = (Kind.EXECUTABLE, Kind.DEBUGINFO)
_WHOLE: Final = 16
"""The least number of digits of a whole build ID; a text with fewer digits counts as a
beginning.
"""
_MOST_VARIANTS: Final = 1000
_MOST_IDS: Final = 8
"""The build IDs that are named for an ambiguous beginning."""
_MOST_LOCATIONS: Final = 100_000
_MOST_FILES: Final = 1_000_000
"""The places of an answer, and the files that are counted once: each takes memory, and each host
can write manifests without end.
"""


class Host(msgspec.Struct):
    """A host, the number of its manifests and of the files in them. ``last_push`` is the time of
    the newest (Unix time).
    """

    host: str
    manifests: int = 0
    files: int = 0
    bytes: int = 0
    private: int = 0
    last_push: float = 0.0


class HostLocation(msgspec.Struct, frozen=True):
    """A place where a host saw a file; times are Unix time."""

    build_id: str
    kind: str
    host: str
    path: str
    container: str
    state: str
    first_seen: float
    last_seen: float
    sha256: str


class KindState(msgspec.Struct, frozen=True):
    """One kind of file of a build ID: its state, and the remedy."""

    kind: str
    state: str
    text: str
    remedy: str = ""


class FilterState(msgspec.Struct, frozen=True):
    """The filter of a bucket; ``generation`` is 0 if there is none. ``made`` is Unix time."""

    generation: int
    files: int
    runs: int
    bytes: int
    made: float


def bucket_of(settings: RemoteSettings) -> Bucket:
    """Return the bucket of the fleet, which must exist. Raises `UsageError`, `RemoteError`."""
    if not settings.url:
        raise UsageError(NO_BUCKET)
    bucket = Bucket(settings.url)
    bucket.identity()
    return bucket


def status(bucket: Bucket) -> list[Host]:
    """Return all hosts that have pushed, the one that wrote last first. Raises `RemoteError`.

    A file that a host lists in several manifests counts once, up to `_MOST_FILES` files.
    """
    hosts: dict[str, Host] = {}
    known: set[int] = set()
    for name, row in manifests.listed(bucket):
        host = hosts.setdefault(name, Host(name))
        host.manifests += 1
        host.last_push = max(host.last_push, row.modified)
    for seen in manifests.read(bucket):
        host = hosts.setdefault(seen.host, Host(seen.host))
        row_key = f"{seen.host}/{seen.row.id}/{seen.row.kind}/{seen.row.sha256}".encode()
        digest = int.from_bytes(fingerprint(row_key, 8))
        if digest in known:
            continue
        if len(known) < _MOST_FILES:
            known.add(digest)
        if seen.row.state == PRIVATE:
            host.private += 1
        else:
            host.files += 1
            host.bytes += seen.row.size
    if len(known) == _MOST_FILES:
        _log.warning("%s: files that several manifests list count several times", bucket.url)
    return sorted(hosts.values(), key=lambda host: (-host.last_push, host.host))


def which(bucket: Bucket, pattern: str) -> list[HostLocation]:
    """Return the places whose path matches a pattern, the one seen last first.

    ``*`` matches slashes, too. Raises `RemoteError`.
    """
    fits = glob(pattern).match
    return _newest(bucket, lambda each: fits(os.fsencode(each.path)) is not None)


def where(bucket: Bucket, text: str) -> list[HostLocation]:
    """Return the places of a build ID, the one that was seen last first. ``text`` may be the
    beginning of the ID.

    Raises `RemoteError`, `InvalidBuildId`, `AmbiguousBuildId`, `ArtifactMissing`.
    """
    prefix = _prefix(text)
    found = _newest(bucket, lambda each: each.build_id.startswith(prefix))
    ids = {each.build_id for each in found}
    if prefix not in ids:
        only(prefix, ids)
    if not found:
        raise ArtifactMissing(
            f"no manifest lists a place of {prefix}; for a whole ID, buildidfs fleet why says more"
        )
    return [each for each in found if prefix not in ids or each.build_id == prefix]


def why(bucket: Bucket, text: str) -> list[KindState]:
    """Return for each kind of a build ID if the bucket has it, and if not, the reason.

    ``text`` may be the beginning of an ID if a host has listed a place of it; private files are
    found by the whole ID only. Raises `RemoteError`, `InvalidBuildId`, `AmbiguousBuildId`,
    `ArtifactMissing`.
    """
    build_id = _parsed_id(bucket, text)
    hidden = manifests.private(build_id, Kind.EXECUTABLE).id
    rows = {
        _Listed(seen.host, seen.row.kind, seen.row.state)
        for seen in manifests.read(bucket)
        if seen.row.id in (str(build_id), hidden)
    }
    negative = Filter(bucket)
    try:
        negative.refresh()
    except RemoteDamaged as error:
        _log.warning("%s", error)
    return [_reason(bucket, build_id, kind, rows, negative) for kind in _KINDS]


class _Listed(NamedTuple):
    """A host whose manifest lists a file of a build ID."""

    host: str
    kind: str
    state: str


def _parsed_id(bucket: Bucket, text: str) -> BuildId:
    """Return the only listed build ID that begins with ``text``; else ``text`` as a whole
    build ID.
    """
    prefix = _prefix(text)
    ids: set[str] = set()
    for seen in manifests.read(bucket):
        name = seen.row.id
        is_shown = len(ids) < _MOST_IDS or name == prefix
        if is_shown and seen.row.state != PRIVATE and name.startswith(prefix):
            ids.add(name)
    if prefix not in ids and (found := only(prefix, ids)):
        return BuildId.from_hex(found)
    if prefix not in ids and len(prefix) < _WHOLE:
        raise ArtifactMissing(f"no manifest lists {prefix}; give the whole ID of a private file")
    return BuildId.from_hex(prefix)


def _reason(
    bucket: Bucket, build_id: BuildId, kind: Kind, rows: set[_Listed], negative: Filter
) -> KindState:
    name = kind.name.lower()
    of_kind = [row for row in rows if row.kind == name]
    hosts = {
        state: sorted({row.host for row in of_kind if row.state == state})
        for state in (PUSHED, VARIANT, PRIVATE)
    }
    head = bucket.head(objects.blob_key(build_id, kind))
    if head is not None:
        description = objects.described(head.metadata)
        by = description.host or "another program"
        others = _variants(bucket, build_id, kind)
        more = f", and {others} with other bytes below variant/" if others else ""
        if not negative.may_have(build_id, kind):
            return KindState(
                name,
                "hidden",
                f"it is in the bucket, pushed by {by}, but the filter does not have it",
                "buildidfs fleet filter --rebuild adds it",
            )
        return KindState(name, "present", f"it is in the bucket, pushed by {by}{more}")
    if bucket.head(objects.lease_key(build_id, kind)) is not None:
        return KindState(name, "uploading", "a host is uploading it, or has begun to")
    if hosts[PUSHED]:
        return KindState(
            name,
            "removed",
            f"{_some(hosts[PUSHED])} pushed it, but it was removed from the bucket",
            "buildidfs push --verify on such a host pushes it again",
        )
    if hosts[VARIANT]:
        return KindState(
            name, "variant", f"the bucket has only variants of it, from {_some(hosts[VARIANT])}"
        )
    if hosts[PRIVATE]:
        return KindState(
            name,
            "private",
            f"{_some(hosts[PRIVATE])} has it, but not every user may read it there",
            "private in [remote] names a bucket for such files",
        )
    if of_kind or not rows:
        text = "no manifest of a host lists it"
    else:
        text = "hosts have other files of this build ID, but not this kind"
    remedy = "push it from a host that has it, or from the build: buildidfs add FILE, then push"
    return KindState(name, "unknown", text, remedy)


def filter_state(bucket: Bucket, *, rebuild: bool = False) -> FilterState:
    """Return the state of the filter; with ``rebuild``, make it again from the listing of the
    bucket first.

    Raises `RemoteError`.
    """
    found = Filter(bucket)
    if rebuild:
        found.rebuild()
    else:
        found.refresh()
    generation = found.generation
    if generation is None:
        return FilterState(0, 0, 0, 0, 0)
    return FilterState(
        generation.number,
        found.count,
        len(generation.runs),
        found.count * 4,
        min(generation.made, int(time.time())),
    )


def _newest(bucket: Bucket, fits: Callable[[HostLocation], bool]) -> list[HostLocation]:
    """Return the places for which ``fits`` returns True; of several rows for one place, the last
    one. Each host gets an equal share of `_MOST_LOCATIONS`, as far as there is room.
    """
    share = max(_MOST_LOCATIONS // max(len({host for host, _ in manifests.listed(bucket)}), 1), 1)
    counts: dict[str, int] = {}
    cut: set[str] = set()
    found: dict[tuple[str, str, str, str, str, str], HostLocation] = {}
    for each in _locations(bucket):
        if fits(each):
            key = (each.build_id, each.kind, each.host, each.path, each.container, each.sha256)
            if key not in found:
                if counts.get(each.host, 0) >= share or len(found) >= _MOST_LOCATIONS:
                    cut.add(each.host)
                    continue
                counts[each.host] = counts.get(each.host, 0) + 1
            found[key] = each
    if cut:
        _log.warning("%d hosts have more places than are shown, as %s", len(cut), min(cut))
    return sorted(found.values(), key=lambda each: (-each.last_seen, each.host, each.path))


def _locations(bucket: Bucket) -> Iterator[HostLocation]:
    for seen in manifests.read(bucket):
        row = seen.row
        for place in row.places:
            yield HostLocation(
                row.id,
                row.kind,
                seen.host,
                place.path,
                place.container,
                row.state,
                place.first,
                place.last,
                row.sha256,
            )


def _variants(bucket: Bucket, build_id: BuildId, kind: Kind) -> int:
    prefix = objects.variants_prefix(build_id, kind)
    return sum(1 for _ in itertools.islice(bucket.list(prefix), _MOST_VARIANTS))


def _prefix(text: str) -> str:
    if _HEX.fullmatch(text) is None:
        raise InvalidBuildId(f"not a build ID nor the start of one: {text!r}")
    return text.lower()


def _some(hosts: list[str]) -> str:
    more = f" and {len(hosts) - 3} more" if len(hosts) > 3 else ""
    return ", ".join(hosts[:3]) + more
