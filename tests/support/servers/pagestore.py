# SPDX-License-Identifier: Apache-2.0
"""A store for the page: containers with names, files that lack something, private and hostile ones.

The files are made to order, so that a test knows what is held of each.
"""

from __future__ import annotations

import math
import struct
import time
from pathlib import Path
from typing import Final

from buildidfs.model import ContainerNames, Kind, Origin, Quality, Trust
from buildidfs.store import NewCapture, Store
from buildidfs.store.schema import HistoryGroup, HistoryRow
from tests.support.elf.elfwriter import DWARF, SHT_STRTAB, SHT_SYMTAB, TEXT, Section, elf_file
from tests.support.harness.captures import capture, sighting

COMPLETE, STRIPPED, PLAIN, PRIVATE, HOSTILE, TWICE = (
    bytes([n]) * 20 for n in (0xC1, 0xC2, 0xC3, 0xC4, 0xC5, 0xC6)
)
SECRET: Final = b"/home/alice/secret-tool"
EVIL: Final = b"/app/<script>alert(1)</script>\"'&\x1b[31m\xe2\x80\xae\xff/x"
NAMES: Final = {
    "3f2a91c05b77": ContainerNames(
        "cart", "cart-7d9f", "shop", "registry.example/cart:1.4\nsha256:1"
    ),
    "77aa01bc9d10": ContainerNames("search", "search-0", "shop", "registry.example/search:2.0"),
    "0badc0ffee00": ContainerNames("<b>evil</b>", "", "", '"><img src=x onerror=alert(1)>'),
    "aaaaaaaaaaaa": ContainerNames("hidden", "", "", "registry.example/hidden:1"),
}


def make(path: Path, *, many: int = 0) -> Path:
    """Make the store; ``many`` is how many more files the containers have."""
    with Store.create(path) as store:
        store.name_containers(_names)
        new = [
            _file(store, COMPLETE, b"/usr/bin/complete", Quality.DEBUGINFO),
            _file(store, STRIPPED, b"/app/server", Quality.DYNSYM, "3f2a91c05b77"),
            _file(store, STRIPPED, b"/app/server", Quality.DYNSYM, "77aa01bc9d10"),
            _file(store, PLAIN, b"/usr/lib/libplain.so", Quality.SYMTAB, "77aa01bc9d10"),
            _file(store, PRIVATE, SECRET, Quality.SYMTAB, "aaaaaaaaaaaa", mode=0o100700),
            _file(store, HOSTILE, EVIL, Quality.NONE, "0badc0ffee00"),
            _file(store, TWICE, b"/usr/bin/twice", Quality.SYMTAB),
            _file(store, TWICE, b"/app/twice", Quality.SYMTAB, "3f2a91c05b77", pad=b"other"),
        ]
        for number in range(many):
            label = ("3f2a91c05b77", "77aa01bc9d10")[number % 2]
            quality = (Quality.DEBUGINFO, Quality.SYMTAB, Quality.DYNSYM)[number % 3]
            path_there = b"/usr/lib/x86_64-linux-gnu/libnumber%d.so.%d" % (number, number % 7)
            build_id = number.to_bytes(4, "big") * 5
            new.append(_file(store, build_id, path_there, quality, label))
        store.commit(new)
    return path


def remember(store: Store, days: int = 30) -> None:
    """Write a history of so many days, a row in two hours: growing, with a bad week."""
    now = time.time_ns()
    steps = days * 12
    for number in range(steps):
        part = number / steps
        bad = 0.2 if 0.5 < part < 0.7 else 0.0
        symbols = int(1000 * (0.4 + 0.35 * part - bad))
        store.history.add(
            HistoryRow(
                now - (steps - number) * 7200 * 10**9,
                build_ids=1000,
                stored_bytes=int((2 << 20) * part + (1 << 18)),
                free_bytes=1 << 34,
                counted=1000,
                executable=980,
                symbols=symbols,
                debuginfo=symbols // 2,
                captured=int(120 + 80 * math.sin(number / 6)),
                lost=40 if bad else 0,
                groups=(
                    HistoryGroup(0, "shop/cart-7d9f/cart", 100, 100, symbols // 10, 10),
                    HistoryGroup(1, "registry.example/cart:1.4", 100, 100, symbols // 10, 10),
                ),
            )
        )


def _names(origin: Origin) -> ContainerNames:
    return NAMES.get(origin.container, ContainerNames())


def _file(
    store: Store,
    build_id: bytes,
    path: bytes,
    quality: Quality,
    container: str = "",
    *,
    mode: int = 0o100755,
    pad: bytes = b"",
) -> NewCapture:
    sections = [TEXT, Section(b".rodata", b"\1" * 3000 + pad)]
    if build_id == PLAIN:
        table = bytes(24) + struct.pack("<IBBHQQ", 1, 0x12, 0, 1, 0x1000, 16)
        sections += [
            Section(b".symtab", table, SHT_SYMTAB, link=5),
            Section(b".strtab", b"\0plain_function\0", SHT_STRTAB),
        ]
    sections += [DWARF] if quality is Quality.DEBUGINFO else []
    content = elf_file(sections, build_id=build_id)
    at = sighting(
        path,
        seen_ns=time.time_ns() - 90 * 10**9,
        container=container,
        mnt_ns_id=int(container[:6] or "1", 16),
        cgroup=f"/docker/{container}".encode() if container else b"",
        mode=mode,
        reach=7,
        host="node-1",
        scanner="proc",
        ino=int.from_bytes(build_id[:2], "big") + len(container),
    )
    kinds = (
        (Kind.EXECUTABLE, Kind.DEBUGINFO) if quality is Quality.DEBUGINFO else (Kind.EXECUTABLE,)
    )
    trust = Trust.CONTAINER if container else Trust.HOST
    return capture(store, content, build_id, at=at, kinds=kinds, quality=quality, trust=trust)


def origins(store: Store, build_id: bytes) -> list[Origin]:
    """The places of a build ID."""
    ordinal = store.index.ordinal(build_id) or 0
    return [each.origin for each in store.index.origins(ordinal)]
