# SPDX-License-Identifier: Apache-2.0
"""Names for addresses of the kernel and its modules, from the kallsyms in a store.

A profile has the address range of its kernel, and the address of a symbol of it at that time. The
kernel is loaded at another address after each boot, and each module at another one.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

from buildidfs.catalog.remedies import AMBIGUOUS, NO_KALLSYMS
from buildidfs.formats.kallsyms import Kallsyms
from buildidfs.formats.perf.script_output import KALLSYMS
from buildidfs.formats.symbolizer_output import Frame
from buildidfs.model import Kind
from buildidfs.symbolize.addresses import NO_NAME, NamedFrames

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from buildidfs.formats.perf.script_output import KernelMapping
    from buildidfs.model import Artifact, BuildId
    from buildidfs.store import Store

# Addresses without a name before any symbols were looked up.
NO_MAPPING: Final = "no mapping"
OTHER_BOOT: Final = "the symbols of this module are those of another boot"

_END: Final = b"_etext"
_MOST_KERNELS: Final = 64
_MOST_BYTES: Final = 64 << 20
_PAGE: Final = 4096


class KernelSymbols:
    """Finds the symbols of one kernel; ``listed`` is its build ID, if the user gave it."""

    def __init__(self, store: Store, listed: BuildId | None) -> None:
        self._store = store
        self._listed = listed
        self._of: KernelMapping | None = None
        self._symbols: Kallsyms | None = None
        self._why = ""

    def at(self, mapped: Mapping[bytes, KernelMapping], dso: bytes, address: int) -> NamedFrames:
        """Return the symbol at an address of the kernel, or of a module, that a profile names.

        ``mapped`` has the kernel and its modules by that name.
        """
        kernel, part = mapped.get(KALLSYMS), mapped.get(dso)
        if kernel is None or part is None:
            return NamedFrames((), NO_MAPPING)
        if kernel != self._of:
            self._of = kernel
            self._symbols, self._why = self._find(kernel)
        symbols = self._symbols
        if symbols is None:
            return NamedFrames((), self._why)
        if not part.start <= address < part.end:
            return NamedFrames((), NO_NAME)
        if dso == KALLSYMS:
            shift, module = _shift(kernel, symbols), b""
        else:
            shift, module = 0, dso.strip(b"[]")
            first = symbols.first_of(module)
            if first is None or not part.start <= first < part.start + _PAGE:
                return NamedFrames((), NO_NAME if first is None else OTHER_BOOT)
        found = symbols.find(address - shift, module)
        if found is None:
            return NamedFrames((), NO_NAME)
        name = found.name.decode("utf-8", "surrogateescape")
        return NamedFrames((Frame(name, start=found.address + shift),))

    def _find(self, kernel: KernelMapping) -> tuple[Kallsyms | None, str]:
        """Return the symbols of a kernel, or the reason why there are none.

        Without a build ID, it is the only kernel in the store with as much code.
        """
        build_id = kernel.build_id or self._listed
        if build_id is not None:
            ordinal = self._store.index.ordinal(build_id) or 0
            artifact = self._store.index.artifact(ordinal, Kind.KALLSYMS)
            symbols = None if artifact is None else self._read(artifact)
            return symbols, "" if symbols is not None else NO_KALLSYMS
        fits: dict[int, Kallsyms] = {}
        for artifact in self._kernels():
            symbols = self._read(artifact)
            end = symbols and symbols.address_of(_END)
            if symbols and end and end + _shift(kernel, symbols) == kernel.end:
                fits[artifact.ordinal] = symbols
        if len(fits) == 1:
            return fits.popitem()[1], ""
        return None, AMBIGUOUS if fits else NO_KALLSYMS

    def _kernels(self) -> Iterator[Artifact]:
        number = self._store.paths.number([KALLSYMS])
        ordinals = () if number is None else self._store.paths.ids(number)
        for ordinal in islice(ordinals, _MOST_KERNELS):
            artifact = self._store.index.artifact(ordinal, Kind.KALLSYMS)
            if artifact is not None:
                yield artifact

    def _read(self, artifact: Artifact) -> Kallsyms | None:
        if artifact.size > _MOST_BYTES:
            return None
        with self._store.open_blob(artifact.digest) as blob:
            return Kallsyms(blob.read_at(0, blob.size))


def _shift(kernel: KernelMapping, symbols: Kallsyms) -> int:
    """Return by how much the kernel of the profile was loaded above that of the symbols."""
    reference = symbols.address_of(kernel.symbol)
    return 0 if reference is None else kernel.reference - reference
