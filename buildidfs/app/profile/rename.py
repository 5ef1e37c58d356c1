# SPDX-License-Identifier: Apache-2.0
"""What each mapping of a profile is to say after it was repaired: a build ID, perhaps a new name.

perf tells files apart by name first: where one name stands for files with different build IDs,
only one of them keeps it, that of the host. The others get the beginning of their build ID as a
suffix (``/app/server@3f2a91c05b77``), which ``buildidfs show`` understands. One whose build ID
nobody knows gets device and inode, lest perf take it for one that has the name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from buildidfs.app.profile.match import KALLSYMS
from buildidfs.app.profile.reading import Reading, is_anonymous
from buildidfs.app.profile.samples import Hit
from buildidfs.formats.perf.headers import CPUMODE, KERNEL, MAX_ID, USER, Named

if TYPE_CHECKING:
    from collections.abc import Iterator

    from buildidfs.app.profile.match import Answer
    from buildidfs.formats.perf.address_spaces import File
    from buildidfs.formats.perf.records import Mapped
    from buildidfs.model import BuildId

TOO_LONG: Final = "its build ID is longer than the 20 bytes that perf can hold"

_SUFFIX_DIGITS: Final = 12
_NAME_MAX: Final = 4095


class Fix(NamedTuple):
    """What to write for a mapping: ``build_id`` empty and ``name`` None for what stays as it is."""

    build_id: bytes = b""
    name: bytes | None = None


class Renaming:
    """Decides for all mappings of a profile.

    ``known`` and ``resolved`` count files (by name, device and inode) that had a build ID in the
    profile, and that have one now. ``renamed`` are all new names with the build IDs they stand for.
    """

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._ids: dict[bytes, dict[BuildId | None, bool]] = {}
        self._table = dict(reading.named)
        self.renamed: dict[bytes, BuildId] = {}
        known: set[int] = set()
        resolved: set[int] = set()
        for hit in reading.everything():
            file = reading.spaces.files[hit.file]
            answer = reading.answer(hit)
            if answer.build_id is not None:
                is_known = file.build_id or self._says(file, answer.build_id)
                (known if is_known else resolved).add(hit.file)
            if _has_name(file):
                build_id = _held(answer)
                ids = self._ids.setdefault(file.path, {})
                ids[build_id] = ids.get(build_id, False) or answer.container == ""
            elif answer.build_id is not None and len(answer.build_id) <= MAX_ID:
                self._add_special(file, answer.build_id)
        self.known, self.resolved = len(known), len(resolved - known)
        self._kept = {path: self._keeper(path, ids) for path, ids in self._ids.items()}

    def fix(self, event: Mapped, time: int) -> Fix:
        """What to write for the mapping ``event``, which the reading knows with that time."""
        spaces = self._reading.spaces
        number = spaces.number(event)
        file = spaces.files[number]
        if not _has_name(file):
            return Fix()
        answer = self._reading.answer(Hit(number, time, event.pid, spaces.image(event.pid, time)))
        build_id = _held(answer)
        name = self._name(file, build_id)
        if build_id is None or file.build_id:
            return Fix(b"", name)
        return Fix(bytes(build_id), name)

    def table(self) -> Iterator[Named]:
        """The build IDs by name, those that were in the profile and stay true among them."""
        for path, ids in self._ids.items():
            keeper = self._kept[path]
            if len(ids) > 1 or keeper is not None:
                self._table.pop(path, None)
            if keeper is not None:
                yield Named(path, keeper)
        for name, build_id in self.renamed.items():
            yield Named(name, build_id)
        yield from self._table.values()

    def _says(self, file: File, build_id: BuildId) -> bool:
        named = self._reading.named.get(file.path)
        return named is not None and named.build_id == build_id

    def _add_special(self, file: File, build_id: BuildId) -> None:
        """The kernel and the vDSO have no file, and perf finds them by what the table says."""
        name = KALLSYMS if file.path.startswith(KALLSYMS) else file.path
        mode = file.cpumode & CPUMODE
        if name.startswith(b"[") and mode in (KERNEL, USER):
            self._table.setdefault(name, Named(name, build_id, mode))

    def _keeper(self, path: bytes, ids: dict[BuildId | None, bool]) -> BuildId | None:
        """The build ID that keeps a name."""
        known = [build_id for build_id in ids if build_id is not None]
        if len(ids) == 1:
            return known[0] if known else None
        hosts = [build_id for build_id in known if ids[build_id]]
        if len(hosts) == 1:
            return hosts[0]
        named = self._reading.named.get(path)
        said = [each for each in known if named is not None and each == named.build_id]
        return said[0] if said else None

    def _name(self, file: File, build_id: BuildId | None) -> bytes | None:
        ids = self._ids[file.path]
        if len(ids) == 1 or (build_id is not None and build_id == self._kept[file.path]):
            return None
        if build_id is None:
            name = b"%b@%d:%d:%d" % (file.path, *file.dev, file.inode)
        else:
            name = b"%b@%b" % (file.path, build_id.hex()[:_SUFFIX_DIGITS].encode())
        if len(name) > _NAME_MAX:
            return None
        if build_id is not None:
            self.renamed[name] = build_id
        return name


def _has_name(file: File) -> bool:
    """Whether it is a file of a process, which may have its build ID in the record."""
    return (
        file.cpumode & CPUMODE == USER
        and file.path.startswith(b"/")
        and not (is_anonymous(file) and not file.build_id and not file.inode)
    )


def _held(answer: Answer) -> BuildId | None:
    """The build ID, if perf can hold it."""
    if answer.build_id is None or len(answer.build_id) > MAX_ID:
        return None
    return answer.build_id
