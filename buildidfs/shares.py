# SPDX-License-Identifier: Apache-2.0
"""Division of bounded tables among those who fill them.

A share belongs to an owner and a place. The owner is a user of the host, or a container of root;
an owner with many places (control groups, mount namespaces) has no more than an owner with one.
If a table is full, the owner with the most loses an entry, at the place where it has the most. So
an entry of the owner with the fewest always finds room.

Nothing here takes a lock.
"""

from __future__ import annotations

import bisect
import functools
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

Name = TypeVar("Name", bound="Hashable")
Item = TypeVar("Item")


class Share(NamedTuple):
    """An owner (``uid 1000``, ``/docker/ID``, ``mnt:4026532177``), and a place that it has."""

    owner: str
    place: str = ""


HOST: Final = Share("")
"""The share of root in the host's mount namespace."""


@functools.lru_cache(1024)
def of_user(uid: int) -> Share:
    """Return the share of a user in the host's mount namespace."""
    return Share(f"uid {uid}") if uid else HOST


class _Ranking:
    """Numbers by text, sorted."""

    def __init__(self) -> None:
        self._values: dict[str, int] = {}
        self._rows: list[tuple[int, str]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, key: str) -> int:
        return self._values.get(key, 0)

    def add(self, key: str, value: int) -> None:
        """Add to the number of a key; an unknown key has 0."""
        old = self._values.get(key, 0)
        if old:
            del self._rows[bisect.bisect_left(self._rows, (old, key))]
        if new := old + value:
            self._values[key] = new
            bisect.insort(self._rows, (new, key))
        else:
            self._values.pop(key, None)

    def largest(self) -> str | None:
        """Return the key with the largest number; None if all are 0."""
        return self._rows[-1][1] if self._rows else None


class Shares:
    """Numbers by share. `largest` is the place with the most of the owner with the most.

    ``others`` is the weight of all shares except `HOST`.
    """

    def __init__(self, others: int = 1) -> None:
        self._weights = 1, others
        self._owners: _Ranking = _Ranking()
        self._places: dict[str, _Ranking] = {}

    def __getitem__(self, share: Share) -> int:
        places = self._places.get(share.owner)
        return 0 if places is None else places[share.place]

    def add(self, share: Share, value: int) -> None:
        """Add to the number of a share; an unknown share has 0."""
        value *= self._weights[share != HOST]
        self._owners.add(share.owner, value)
        places = self._places.setdefault(share.owner, _Ranking())
        places.add(share.place, value)
        if not places:
            del self._places[share.owner]

    def rank(self, share: Share) -> tuple[int, int]:
        """Return the numbers of its owner and of its place."""
        return self._owners[share.owner], self[share]

    def largest(self) -> Share | None:
        """Return the share that has to give way; None if all are 0."""
        owner = self._owners.largest()
        place = None if owner is None else self._places[owner].largest()
        return None if owner is None or place is None else Share(owner, place)


class Seats:
    """At most ``most`` entries of a table; ``reserve`` of them are for `HOST` alone.

    ``refused`` counts the entries that found no room, or lost their room to another owner's.
    """

    def __init__(self, most: int, reserve: int = 0) -> None:
        self._most = most
        self._reserve = reserve
        self._shares = Shares()
        self._hosts = 0
        self._count = 0
        self._exchanged: Share | None = None
        self.refused = 0

    def __len__(self) -> int:
        return self._count

    def take(self, share: Share, first: Share | None = None) -> Share | None:
        """Add an entry of ``share``; return the share that has to give up an entry, None for none.

        If ``first`` (by default ``share`` itself) has as many as any other, it has to. The caller
        then removes an entry, and calls `leave` for it.
        """
        self._exchanged = None
        self._count += 1
        if share == HOST:
            self._hosts += 1
        if share != HOST or self._hosts > self._reserve:
            self._shares.add(share, 1)
        if self._is_free(0):
            return None
        self.refused += 1
        first = share if first is None else first
        full = self._shares.largest()
        if full is None or self._shares.rank(first) >= self._shares.rank(full):
            full = first
        if full == share:
            self._exchanged = share
        return full

    def exchange(self, share: Share) -> bool:
        """Return True if `take` has just returned ``share`` for an entry of ``share``, and would
        do so once more: the caller then replaces an entry, and calls neither `take` nor `leave`.
        """
        if share != self._exchanged or self._is_free():
            return False
        self.refused += 1
        return True

    def leave(self, share: Share) -> None:
        """Remove an entry."""
        if share != self._exchanged:
            self._exchanged = None
        self._count -= 1
        if share != HOST or self._hosts > self._reserve:
            self._shares.add(share, -1)
        if share == HOST:
            self._hosts -= 1

    def _is_free(self, count: int = 1) -> bool:
        """Return True if so many more entries find room beside the reserve."""
        return self._count + count + max(self._reserve - self._hosts, 0) <= self._most


class Turns:
    """Shares that have something to do: owners take turns, and the places of each owner."""

    def __init__(self) -> None:
        self._owners: dict[str, dict[str, None]] = {}

    def __contains__(self, share: Share) -> bool:
        return share.place in self._owners.get(share.owner, ())

    def __bool__(self) -> bool:
        return bool(self._owners)

    def add(self, share: Share) -> None:
        """Add a share behind the others, unless it is there."""
        self._owners.setdefault(share.owner, {}).setdefault(share.place)

    def remove(self, share: Share) -> None:
        """Remove a share, which must be there."""
        places = self._owners[share.owner]
        del places[share.place]
        if not places:
            del self._owners[share.owner]

    def next(self) -> Share | None:
        """Return the share whose turn it is, and put it behind the others; None if there is
        none.
        """
        if not self._owners:
            return None
        owner = next(iter(self._owners))
        places = self._owners[owner] = self._owners.pop(owner)
        place = next(iter(places))
        places[place] = places.pop(place)
        return Share(owner, place)


class FairQueue(Generic[Item]):
    """A queue of at most ``most`` items, of which the shares take turns.

    If it is full, the share that `Seats` names loses its last item.
    """

    def __init__(self, most: int, reserve: int = 0) -> None:
        self._seats = Seats(most, reserve)
        self._turns = Turns()
        self._items: dict[Share, deque[Item]] = {}

    def __len__(self) -> int:
        return len(self._seats)

    @property
    def refused(self) -> int:
        """Return the number of items that found no room, or lost it."""
        return self._seats.refused

    def put(self, share: Share, item: Item) -> None:
        """Append an item."""
        self._items.setdefault(share, deque()).append(item)
        self._turns.add(share)
        if (full := self._seats.take(share)) is not None:
            self._items[full].pop()
            self._leave(full)

    def pop(self) -> Item | None:
        """Return the next item; None if there is none."""
        share = self._turns.next()
        if share is None:
            return None
        item = self._items[share].popleft()
        self._leave(share)
        return item

    def _leave(self, share: Share) -> None:
        self._seats.leave(share)
        if not self._items[share]:
            del self._items[share]
            self._turns.remove(share)


class FairTable(Generic[Name, Item]):
    """At most ``most`` items by name, in the order in which they were put.

    If it is full, the share that `Seats` names loses its first item, or with ``keep_first`` its
    last one. A table that never was full is a dictionary, and counts no shares.
    """

    def __init__(self, most: int, reserve: int = 0, *, keep_first: bool = False) -> None:
        self._seats = Seats(most, reserve)
        self._undivided = most - reserve
        self._keep_first = keep_first
        self._items: dict[Name, tuple[Share, Item]] = {}
        self._names: dict[Share, OrderedDict[Name, None]] = {}

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, name: Name) -> bool:
        return name in self._items

    @property
    def refused(self) -> int:
        """Return the number of items that found no room, or lost it."""
        return self._seats.refused

    def get(self, name: Name) -> Item | None:
        """Return an item; None if there is none."""
        found = self._items.get(name)
        return None if found is None else found[1]

    def first(self) -> Item | None:
        """Return the item that was put before all others; None if there is none."""
        return next((item for _, item in self._items.values()), None)

    def values(self) -> list[Item]:
        """Return all items."""
        return [item for _, item in self._items.values()]

    def items(self) -> list[tuple[Name, Item]]:
        """Return all names with their items."""
        return [(name, item) for name, (_, item) in self._items.items()]

    def pop(self, name: Name) -> Item | None:
        """Remove an item and return it; None if there is none."""
        found = self._items.pop(name, None)
        if found is None:
            return None
        share, item = found
        if self._names:
            names = self._names[share]
            del names[name]
            if not names:
                del self._names[share]
            self._seats.leave(share)
        return item

    def renew(self, name: Name, item: Item) -> bool:
        """Replace an item, and put it behind all others; return False if there is none."""
        found = self._items.pop(name, None)
        if found is None:
            return False
        share = found[0]
        self._items[name] = share, item
        if self._names:
            self._names[share].move_to_end(name)
        return True

    def put(self, name: Name, share: Share, item: Item) -> Item | None:
        """Add an item, whose name must be new; return the one that had to go, perhaps itself."""
        if not self._names:
            if len(self._items) < self._undivided:
                self._items[name] = share, item
                return None
            for known, (owner, _) in self._items.items():
                self._names.setdefault(owner, OrderedDict())[known] = None
                self._seats.take(owner)
        self._items[name] = share, item
        self._names.setdefault(share, OrderedDict())[name] = None
        if self._seats.exchange(share):
            old, _ = self._names[share].popitem(last=self._keep_first)
            if not self._names[share]:
                del self._names[share]
            return self._items.pop(old)[1]
        first = share if self._keep_first else next(iter(self._items.values()))[0]
        full = self._seats.take(share, first)
        if full is None:
            return None
        names = self._names[full]
        return self.pop(next(reversed(names) if self._keep_first else iter(names)))


def fair(rows: Iterable[Item], most: int, share: Callable[[Item], Share]) -> list[Item]:
    """Return at most ``most`` rows, of each share the first ones, in their order."""
    table: FairTable[int, Item] = FairTable(most, keep_first=True)
    for number, row in enumerate(rows):
        table.put(number, share(row), row)
    return table.values()


class Quota:
    """Divides ``most`` places: each user gets at most half of those that the other users leave."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: dict[Hashable, int] = {}
        self._total = 0

    def take(self, user: Hashable, count: int = 1) -> bool:
        """Take places for a user; return False if the user would have too many."""
        if not self.has(user, count):
            return False
        self._held[user] = self._held.get(user, 0) + count
        self._total += count
        return True

    def has(self, user: Hashable, count: int = 1) -> bool:
        """Return True if `take` would give the user that many places."""
        held = self._held.get(user, 0)
        return 2 * (held + count) <= self._most - self._total + held

    def give_back(self, user: Hashable, count: int = 1) -> None:
        """Give back places of a user."""
        held = self._held.get(user, 0)
        if not held:
            return
        count = min(count, held)
        self._total -= count
        if held > count:
            self._held[user] = held - count
        else:
            del self._held[user]
