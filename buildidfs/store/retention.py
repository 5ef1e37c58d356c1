# SPDX-License-Identifier: Apache-2.0
"""How much is kept: room is made for what is captured, by removing what is worth least.

`Keeper` does so before bytes are written that would go beyond a limit, and when the filesystem is
full all the same. A capture fails only when nothing may be removed. More is removed than is needed
at the moment, so that not every capture has to.
"""

from __future__ import annotations

import errno
import itertools
import logging
import math
import os
import threading
import time
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from buildidfs.errors import StoreFull
from buildidfs.store import removal, schema, uselog
from buildidfs.store.candidates import Candidate, Candidates
from buildidfs.store.failures import show
from buildidfs.store.recorder import load_counters
from buildidfs.store.removal import Removed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from buildidfs.model import Digest
    from buildidfs.store.blobs import Blobs, Staged
    from buildidfs.store.candidates import AltLinks
    from buildidfs.store.environment import Environment

T = TypeVar("T")

#: Of a limit, what is removed beyond the need.
_BEYOND: Final = 50

#: Attempts to write after room was made for it. Somebody else may be filling the filesystem.
_TRIES: Final = 8

#: Blobs removed before it is looked again how much room there is.
_AT_ONCE: Final = 256

_FOLD_S: Final = 60

#: When nothing was found that may go, it is not looked for at the old end again for so long.
_IN_VAIN_S: Final = 5

_log = logging.getLogger(__name__)


class Policy(msgspec.Struct, frozen=True):
    """What a store may take. Sizes in bytes, ages in seconds; None is no limit.

    ``max_size`` covers blobs and index, ``keep_free`` is what the filesystem is to have left: where
    it has less, a store that ``yields`` gives room back, and one that does not ceases to grow. What
    was not used for ``max_age`` goes whatever room there is; what was used or captured within
    ``min_age`` stays.
    """

    max_size: int | None = None
    keep_free: int = 0
    yields: bool = True
    max_age: int | None = None
    min_age: int = 0


class Choice(msgspec.Struct, frozen=True):
    """A blob, where it was seen last, whether it goes, and why."""

    candidate: Candidate
    path: bytes
    goes: bool
    why: str


class Keeper:
    """Keeps a store within a policy. From any thread; one makes room at a time."""

    def __init__(self, env: Environment, blobs: Blobs, policy: Policy, altlinks: AltLinks) -> None:
        self.policy = policy
        self._env = env
        self._blobs = blobs
        self._lock = threading.Lock()
        self._candidates = Candidates(env, policy.min_age, altlinks)
        self._folded = self._in_vain = -math.inf
        self._spare = 0  # bytes that were removed and not taken again, of a store that may not grow
        self.removed = Removed()
        """All that was removed so far."""

    # --- for who writes --------------------------------------------------------------------

    def staging(self, size: int, work: Callable[[], T]) -> T:
        """Do what brings ``size`` bytes onto the filesystem, with room made for them.

        Raises what ``work`` does; OSError (EFBIG) for more than there could ever be room for;
        `StoreFull` when nothing may be removed.
        """
        self._refuse_giant(size)
        self._make_room(size, staged=False)
        return self._repeated(size, work, ())

    def writing(self, size: int, work: Callable[[], T], staged: Sequence[Staged]) -> T:
        """Do what makes ``size`` staged bytes count, with room made for them.

        Raises what ``work`` does, and `StoreFull` when nothing may be removed.
        """
        if size:
            self._make_room(size, staged=True)
        return self._repeated(size, work, staged)

    def _repeated(self, size: int, work: Callable[[], T], staged: Sequence[Staged]) -> T:
        for _ in range(_TRIES):
            try:
                return work()
            except StoreFull as error:
                if any(each.doubtful for each in staged):
                    raise
                if not self.shrink(size):
                    raise self._hopeless(error, size) from error
        return work()

    def shrink(self, size: int) -> bool:
        """Make room for ``size`` bytes on a full filesystem; False if nothing may be removed."""
        with self._lock:
            return self._evict(size + self._beyond())

    def enforce(self) -> Removed:
        """Remove what is too old, or beyond the limits; returns what that was."""
        before = msgspec.structs.replace(self.removed)
        with self._lock:
            self._prepare()
            self._expire()
            lack = self._lack(0, staged=True)
            if lack > 0:
                self._evict(lack + self._beyond())
        after = self.removed
        return Removed(
            after.blobs - before.blobs, after.bytes - before.bytes, after.ids - before.ids
        )

    @property
    def most_staged(self) -> int:
        """Bytes that may wait to be committed: they take room that nobody can make."""
        usage = os.statvfs(self._env.root)
        total = usage.f_blocks * usage.f_frsize
        return max(min(total, self.policy.max_size or total) // 16, 1 << 20)

    # --- how much --------------------------------------------------------------------------

    def _make_room(self, size: int, *, staged: bool) -> None:
        if self._lack(size, staged=staged) > 0:
            with self._lock:
                for _ in range(_TRIES):  # others write meanwhile
                    lack = self._lack(size, staged=staged)
                    if lack <= 0:
                        break
                    if not self._evict(lack + self._beyond()):
                        raise self._hopeless(None, size)
        if not staged:
            self._spare = max(0, self._spare - size)

    def _lack(self, size: int, *, staged: bool) -> int:
        found = lacks(self._env, self._blobs, self.policy, size, staged=staged, spare=self._spare)
        return max(found.values())

    def _beyond(self) -> int:
        limits = [limit for limit in (self.policy.max_size, self.policy.keep_free) if limit]
        return min(limits, default=0) // _BEYOND

    def _refuse_giant(self, size: int) -> None:
        """Remove nothing for what will not fit whatever is removed.

        Raises OSError (EFBIG) for what never will, `StoreFull` if others have taken the room.
        """
        policy = self.policy
        with self._env.read() as txn:
            stored = load_counters(self._env, txn).stored_bytes
        usage = os.statvfs(self._env.root)
        most = usage.f_blocks * usage.f_frsize - policy.keep_free
        if policy.max_size is not None:
            most = min(most, policy.max_size - self._env.bytes_used())
        if size > max(most, 0):
            raise OSError(errno.EFBIG, f"its {size} bytes are more than the store may ever take")
        free = self._blobs.free_bytes() - policy.keep_free
        if size > stored + (free if policy.yields else max(free, 0)):
            raise self._hopeless(None, size)

    def _hopeless(self, error: StoreFull | None, size: int) -> StoreFull:
        """What to say when there is no room, and none can be made."""
        kept = []
        if self._candidates.kept_pinned:
            kept.append(f"{self._candidates.kept_pinned} blobs are pinned")
        if self._candidates.kept_young:
            kept.append("the others were used within min-age")
        why = f"nothing may be removed ({', '.join(kept) or 'there is nothing else in it'})"
        if error is not None:
            return StoreFull(f"{error}; {why}")
        store = f"store {show(self._env.root)}"
        if lacks(self._env, self._blobs, self.policy, size).get("max-size", 0) > 0:
            return StoreFull(f"{store} is as large as it may be: {why}")
        return StoreFull(f"{store}: no space left on its filesystem: {why}")

    # --- removing --------------------------------------------------------------------------

    def _prepare(self) -> None:
        self._candidates.refresh()
        if time.monotonic() - self._folded > _FOLD_S:
            uselog.fold(self._env)
            self._folded = time.monotonic()

    def _expire(self) -> None:
        if self.policy.max_age is not None:
            before = expiry(self.policy.max_age)
            self._remove(self._candidates.oldest(before))

    def _evict(self, size: int) -> bool:
        """Remove so many bytes, if there are so many that may go; False if there are none.

        What somebody else removes at the same time counts as well.
        """
        self._prepare()
        found = self._remove(_worth(self._chosen(), size))
        now = time.monotonic()
        if not found and now - self._in_vain > _IN_VAIN_S:
            # What was seen long ago and recorded just now is behind us.
            self._in_vain = now
            self._candidates.rewind()
            found = self._remove(_worth(self._chosen(), size))
        return found > 0

    def _chosen(self) -> Iterator[Candidate]:
        yield from self._candidates.again()
        yield from self._candidates.oldest()

    def _remove(self, candidates: Iterable[Candidate]) -> int:
        """Remove them; returns how many it were."""
        rest = iter(candidates)
        count = 0
        while batch := [each.digest for each in itertools.islice(rest, _AT_ONCE)]:
            done = removal.remove(self._env, self._blobs, batch)
            count += len(batch)
            self.removed.blobs += done.blobs
            self.removed.bytes += done.bytes
            self._spare += done.bytes
            self.removed.ids += done.ids
            _log.info("removed %d blobs, %d bytes, to make room", done.blobs, done.bytes)
        return count


def lacks(
    env: Environment,
    blobs: Blobs,
    policy: Policy,
    size: int = 0,
    *,
    staged: bool = True,
    spare: int = 0,
) -> dict[str, int]:
    """By how many bytes each limit would be exceeded with ``size`` more; negative is room.

    ``staged`` says that they are on the filesystem already. Of ``spare`` bytes it is known that the
    store has made room for them: so many it may take again.
    """
    found = {"keep-free": -1}
    if policy.keep_free:
        new = 0 if staged else size
        found["keep-free"] = policy.keep_free - blobs.free_bytes() + new
        if not policy.yields:
            found["keep-free"] = min(found["keep-free"], new - spare)
    if policy.max_size is not None:
        with env.read() as txn:
            stored = load_counters(env, txn).stored_bytes
        found["max-size"] = stored + env.bytes_used() + size - policy.max_size
    return found


def expiry(max_age: int) -> int:
    """What was used before that (Unix time in seconds) is too old: uses are known to the hour."""
    return int(time.time()) - max_age - schema.USE_SLACK_S


def plan(
    env: Environment, blobs: Blobs, policy: Policy, altlinks: AltLinks, *, stays: bool
) -> Iterator[Choice]:
    """What a policy removes now, in that order; then, with ``stays``, what it keeps."""
    candidates = Candidates(env, policy.min_age, altlinks, patient=True)
    chosen: set[Digest] = set()
    exceeded = lacks(env, blobs, policy)
    limit = max(exceeded, key=lambda name: exceeded[name])
    lack = exceeded[limit]

    def going(candidate: Candidate, why: str) -> Choice:
        nonlocal lack
        lack -= candidate.size
        chosen.add(candidate.digest)
        return Choice(candidate, candidates.path(candidate), True, why)

    if policy.max_age is not None:
        for candidate in candidates.oldest(expiry(policy.max_age)):
            yield going(candidate, "max-age")
    for walk in (candidates.again(), candidates.oldest()):
        for candidate in walk if lack > 0 else ():
            if candidate.digest not in chosen:
                yield going(candidate, f"{limit}; {candidate.again or 'oldest use'}")
            if lack <= 0:
                break
    if stays:
        for candidate in Candidates(env, policy.min_age, altlinks).everything():
            if candidate.digest not in chosen:
                why = candidate.stays or "within the limits"
                yield Choice(candidate, candidates.path(candidate), False, why)


def _worth(candidates: Iterable[Candidate], size: int) -> Iterator[Candidate]:
    """As many as have so many bytes together, each once."""
    seen: set[Digest] = set()
    left = size
    for candidate in candidates if left > 0 else ():
        if candidate.digest not in seen:
            seen.add(candidate.digest)
            left -= candidate.size
            yield candidate
        if left <= 0:  # before the next is taken, which would count as looked at
            return
