# SPDX-License-Identifier: Apache-2.0
"""The reasons why a file has no names, and the remedy for each, in one place.

A reason is a clause for a person, and the key of its remedy. ``code`` is the stable name for
programs. `coverage`, `repair`, `why` and `status` print reasons and remedies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.formats.elf.core import Unknown
from buildidfs.names import printable
from buildidfs.store.placement import NOT_AS_MAPPED, OFFSETS_DIFFER
from buildidfs.wording import moment

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from buildidfs.store.location_rows import Removal

NO_BUILD_ID: Final = "no build ID recorded, and none in the journal"
OTHER_HOST: Final = "only on other machines a file was seen at this path"
OTHER_FILE: Final = "the journal knows only other files at this path"
AMBIGUOUS: Final = "several build IDs fit, and nothing tells which"
TOO_LONG: Final = "its build ID is longer than the 20 bytes that perf can hold"
NO_MAPPING: Final = "no mapping recorded for that address"
ANONYMOUS: Final = "memory without a file: generated code (JIT)"
EMULATED: Final = "memory without a file: code that an emulator has translated"
MOVED: Final = "memory without a file: code of the program itself, on huge pages or unpacked"
WITHOUT_FILE: Final = frozenset((ANONYMOUS, EMULATED, MOVED))
MEMFD: Final = "a memfd that was never captured: a program run from memory, or generated code (JIT)"
NO_KERNEL: Final = "the profile names no build ID of its kernel"
GUEST: Final = "a virtual machine, into which a profile of the host does not see"
OTHER_CONTEXT: Final = (
    "neither a process, the kernel nor a guest: a hypervisor, or a context unknown to this version"
)

SHARED: Final = "unrelated programs have this build ID, and nothing tells which one it was"
NOT_CAPTURED: Final = "never captured"
STRIPPED: Final = "stripped: only dynamic symbols, no debuginfo captured"
NO_SYMBOLS: Final = "stripped: no symbols, no debuginfo captured"
NO_EXECUTABLE: Final = "only its debuginfo was captured"
NO_KALLSYMS: Final = "symbols of this kernel never captured"
NO_DEBUGINFO: Final = "it has symbols, but no file with DWARF was seen: lines are missing"
WITHHELD: Final = "all debuginfo that was seen is believed less than the executable"
AT_ITS_PATH: Final = "still at its path on this host"
STILL_HERE: Final = f"never captured, and {AT_ITS_PATH}"
NEVER_SEEN: Final = "no scan and no watch of this store has seen it"
NO_ROOM: Final = "there was no room for it, and this host had it at that time"
NOT_KEPT: Final = "it was seen, and its bytes are not in the store"
REMOVED: Final = "removed to make room"
AGED: Final = "removed because it was unused for longer than max-age"
DAMAGED: Final = "removed because its blob was damaged and no file had the same bytes"
REMOVALS: Final = (REMOVED, AGED, DAMAGED)
NOT_SERVED: Final = "nothing is held under this build ID that every user may read"
COMPLETE: Final = "nothing is missing: the store has names for it"
UNREAD: Final = "the store has its DWARF, but the symbolizer of this host finds no line in it"
UNREPAIRED: Final = "the store has names for it, but the profile lacks its build ID"

INSTALLED: Final = "its debug package is installed on this host: capture its files"

NOTHING_RECORDED: Final = (
    "nothing tells what some files were: have watch run while you record (buildidfs up), or record"
    " build IDs (perf record --buildid-mmap); for this profile, capture the files where they still"
    " are (scan perf-data), or say what they were (repair --assign PATH=ID)"
)
OTHER_MACHINE: Final = (
    "the profile was made on {host}, and this store has seen some of its files on other machines"
    " only: use the store of {host} (--store), or say what they were (repair --assign PATH=ID)"
)
MAY_BE_HERE: Final = (
    "what was never captured may still be here: buildidfs scan perf-data takes what this machine"
    " has of a profile"
)


def unrepaired(gain: tuple[float, float], path: bytes) -> str:
    """Return a sentence on a profile without some build IDs; ``gain`` has the shares of
    `Coverage.gain_of_repair`.
    """
    import shlex

    file = shlex.quote(printable(path))
    return (
        f"perf can name {gain[0]:.1%} of the samples, and {gain[1]:.1%} after: buildidfs repair"
        f" {file} -o repaired.data"
    )


class Remedy(msgspec.Struct, frozen=True):
    """The remedy for a reason, as a clause; ``command`` is the first step, empty if no command
    helps.

    A command may contain ``{file}`` (the profile or core file), ``{scan}`` (the scan command for
    it), ``{path}``, ``{id}``, and ``{wanted}`` (``--for`` and the file, or else the ID).
    """

    code: str
    text: str
    command: str = ""


# If the file is still at its path, a finding of its own says so, with a command that captures it.
_BACK: Final = (
    "they come back from a debuginfod server (buildidfs fetch), from the package, debug package or"
    " image (scan package, scan image), from a process that still runs it (scan proc), or from a"
    " host that has it (buildidfs bundle there, mount --bundle here)"
)
_FETCH: Final = "buildidfs fetch {wanted}"

_OF_REASON: Final = {
    NO_BUILD_ID: Remedy("no-build-id", NOTHING_RECORDED, "buildidfs scan {scan} {file}"),
    SHARED: Remedy(
        "shared-build-id",
        "say which program it was by its adopted ID (repair --assign PATH=ID); show has those",
        "buildidfs show {id}",
    ),
    OFFSETS_DIFFER: Remedy(
        "other-offsets",
        "say which file it was by its adopted ID (repair --assign PATH=ID); show has those",
        "buildidfs show {id}",
    ),
    NOT_AS_MAPPED: Remedy(
        "not-as-mapped",
        "a tool such as patchelf has rewritten one of the two: capture the file that was mapped"
        " where it still is",
        "buildidfs scan {scan} {file}",
    ),
    OTHER_HOST: Remedy(
        "other-host",
        "use the store of the machine that made the profile (--store), or say what the file was"
        " (repair --assign PATH=ID)",
    ),
    OTHER_FILE: Remedy(
        "other-file",
        "have watch run while you record (buildidfs up); for this profile say what the file was"
        " (repair --assign PATH=ID)",
        "buildidfs which {path}",
    ),
    AMBIGUOUS: Remedy(
        "ambiguous",
        "record build IDs (perf record --buildid-mmap), or a clock that can be compared"
        " (perf record -k mono); for this profile say which file it was (repair --assign PATH=ID)",
        "buildidfs which {path}",
    ),
    TOO_LONG: Remedy(
        "long-build-id",
        "perf cannot read it: name addresses with buildidfs symbolize",
        "perf script --show-mmap-events -i {file} | buildidfs symbolize --perf-script",
    ),
    NO_MAPPING: Remedy(
        "no-mapping",
        "perf lost the record of the mapping, or the process made it before the recording: record"
        " with larger buffers (perf record -m), and for processes that run already with -p or -a;"
        " of a process whose first thread had ended by then, perf sees no mappings at all",
    ),
    ANONYMOUS: Remedy(
        "generated-code",
        "buildidfs jit lists the processes whose names are kept, and buildidfs repair uses these:"
        " let the runtime write /tmp/perf-PID.map (node --perf-basic-prof, python3 -X perf, java"
        " with perf-map-agent) while buildidfs watch runs; frames without an owner can also be"
        " stacks that were walked without frame pointers (perf record --call-graph dwarf)",
    ),
    EMULATED: Remedy(
        "emulated-code",
        "let the emulator name its code (from QEMU 8.0 on qemu-ARCH -perfmap, or"
        " QEMU_PERFMAP=1 in its environment) while buildidfs watch runs: buildidfs repair uses the"
        " names; scan proc captures the program and libraries of the guest",
        "buildidfs scan proc",
    ),
    MOVED: Remedy(
        "moved-code",
        "perf names such code only if it sees the program start: record while it starts (perf"
        " record -- PROGRAM), or run it without huge pages or unpacked (upx -d); scan proc captures"
        " the program, so that symbolize names addresses in it",
        "buildidfs scan proc",
    ),
    MEMFD: Remedy(
        "memfd",
        "have watch run while the program starts; a runtime that compiles into a memfd needs"
        " /tmp/perf-PID.map, which buildidfs repair uses",
        "buildidfs up",
    ),
    NO_KERNEL: Remedy(
        "no-kernel",
        "record as root, or with kernel.kptr_restrict=0, so that perf can read the build ID of the"
        " kernel",
    ),
    GUEST: Remedy("guest", "record inside the guest, or with perf kvm --guest on the host"),
    Unknown.NOT_DUMPED: Remedy(
        "not-dumped",
        "let the kernel dump the first pages of files (bit 4 of /proc/PID/coredump_filter), and"
        " have watch run while programs run, which knows files by path and time",
        "buildidfs up",
    ),
    Unknown.CUT_OFF: Remedy(
        "cut-off",
        "raise the limit of core files (ulimit -c, ProcessSizeMax= of coredump.conf(5)); for this"
        " core capture the program where it still is",
        "buildidfs add {path}",
    ),
    Unknown.NO_BUILD_ID: Remedy(
        "no-id-in-core",
        "capture the program where it still is; have watch run while programs run, which knows"
        " files by path and time; link with --build-id",
        "buildidfs add {path}",
    ),
    OTHER_CONTEXT: Remedy(
        "other-context",
        "record with a perf that marks call chains as this version reads them; code of a hypervisor"
        " is in no file of this machine",
    ),
    NOT_CAPTURED: Remedy(
        "not-captured",
        "capture it where it still is, on this host or in an image, or fetch it from a debuginfod"
        " server (buildidfs fetch)",
        "buildidfs scan {scan} {file}",
    ),
    STILL_HERE: Remedy("still-here", "capture it while it is there", "buildidfs add {path}"),
    STRIPPED: Remedy(
        "stripped",
        "install the debug package of the program and capture its files, capture the package"
        " itself, or fetch it from a debuginfod server (buildidfs fetch)",
        "buildidfs scan tree /usr/lib/debug",
    ),
    NO_SYMBOLS: Remedy(
        "no-symbols",
        "install the debug package of the program and capture its files, capture the package"
        " itself, or fetch it from a debuginfod server (buildidfs fetch)",
        "buildidfs scan tree /usr/lib/debug",
    ),
    NO_EXECUTABLE: Remedy(
        "no-executable",
        "perf and gdb want the binary beside its debuginfo: capture it where it still is, or its"
        " package",
        "buildidfs scan package PACKAGE",
    ),
    NO_KALLSYMS: Remedy(
        "no-kallsyms",
        "capture the symbols of the kernel while it runs, as root; of another kernel the files that"
        " are installed (scan kernel --all)",
        "buildidfs scan kernel",
    ),
    NO_DEBUGINFO: Remedy(
        "no-debuginfo",
        "functions have names; for files and lines install the debug package, or fetch it from a"
        " debuginfod server (buildidfs fetch); build a program that no package has with -g",
        "buildidfs scan tree /usr/lib/debug",
    ),
    WITHHELD: Remedy(
        "withheld",
        "capture the debug package that belongs to the executable, or trust the place of the"
        " debuginfo ([[trust.rules]] in buildidfs.toml(5))",
        "buildidfs scan package PACKAGE",
    ),
    NEVER_SEEN: Remedy(
        "never-seen",
        "have watch run (buildidfs up), or capture the file where it still is; buildidfs where"
        " --live says if a process maps it now",
        "buildidfs where --live {id}",
    ),
    NO_ROOM: Remedy(
        "no-room",
        "for the next time make room (buildidfs prune --dry-run --max-size SIZE shows what would"
        f" go); its bytes were never here: {_BACK}",
        _FETCH,
    ),
    NOT_KEPT: Remedy(
        "not-kept",
        "a limit or remove took its bytes, or they were gone before they could be copied:"
        f" {_BACK}",
        _FETCH,
    ),
    REMOVED: Remedy(
        "removed",
        f"its bytes are gone: {_BACK}; for the next time set a larger limit ([retention] max-size"
        " in buildidfs.toml(5)), or pin what has to stay while it is here (buildidfs pin)",
        _FETCH,
    ),
    AGED: Remedy(
        "aged",
        f"its bytes are gone: {_BACK}; for the next time set a larger max-age (buildidfs.toml(5)),"
        " or pin what has to stay while it is here (buildidfs pin)",
        _FETCH,
    ),
    DAMAGED: Remedy(
        "damaged",
        "look for errors of the disk and the memory in the kernel log; what is left of it is in the"
        f" quarantine of the store; its bytes are gone: {_BACK}",
        "buildidfs check",
    ),
    NOT_SERVED: Remedy(
        "not-served",
        "on the machine of the store the command says more, to a user who may read the store",
        "buildidfs why {id}",
    ),
    UNREPAIRED: Remedy(
        "not-repaired",
        "let repair add the build IDs that perf did not record, and give its result to perf report",
        "buildidfs repair {file} -o repaired.data",
    ),
    UNREAD: Remedy(
        "unread",
        "name its addresses with another symbolizer, or another version (buildidfs symbolize"
        " --with eu-addr2line); it may not read the version or the compression of this DWARF",
        "buildidfs symbolize --with eu-addr2line {id}+ADDRESS",
    ),
    COMPLETE: Remedy(
        "complete",
        "point the client at the mount (buildidfs-mount(7)): perf --buildid-dir, or"
        " DEBUGINFOD_URLS=file:///buildid",
        "buildidfs mount /buildid",
    ),
}  # fmt: skip

_UNKNOWN: Final = Remedy("other", "buildidfs doctor says what this machine lacks")

_OF_LOSS: Final = (
    (("No such", "gone"),
     "they were gone before they could be opened: less load, or more CPUs; buildidfs doctor says if"
     " watch may run before all else"),
    (("not copied within", "wait to be copied"),
     "the store is too slow for what starts: faster storage, or more patience (pin-seconds and"
     " pin-bytes of buildidfs.toml(5))"),
    (("denied", "not permitted"),
     "buildidfs doctor says which privilege is missing; root cannot read a FUSE filesystem that its"
     " user mounted without allow_other"),
    (("full", "space", "room"),
     "make room on the filesystem of the store: buildidfs prune --dry-run says what would go"),
    (("generated code",),
     "the container named starts more JIT compilers than its share, and loses names of its own"
     " only: limit its processes"),
    (("share", "faster"),
     "the container named maps more new files than its share, and loses its own only: limit it"),
    (("answer", "silent"), "a filesystem does not answer: look at its server"),
)  # fmt: skip


def removed(what: Removal) -> str:
    """Return the reason for which the bytes were removed, with the time."""
    why = DAMAGED if what.damaged else AGED if what.aged else REMOVED
    return f"{why} at {moment(what.time)}"


def without_time(why: str) -> str:
    """Return a reason without the time of a removal."""
    return next((each for each in REMOVALS if why.startswith(each)), why)


def of_reason(why: str) -> Remedy:
    """Return the remedy for a reason of this module, or of the ELF decoders."""
    return _OF_REASON.get(without_time(why), _UNKNOWN)


def of_own_build(remedy: Remedy) -> Remedy:
    """Return the remedy for a file of this host without DWARF that no package contains."""
    if remedy is _OF_REASON[NO_DEBUGINFO]:
        return Remedy(
            remedy.code,
            "no package of this host has it: build it with -g for files and lines, and capture the"
            " directory where it was built",
            "buildidfs scan tree BUILD_DIRECTORY",
        )
    return Remedy(
        remedy.code,
        "no package of this host has it: capture the file with its symbols, from the directory"
        " where it was built",
        "buildidfs scan tree BUILD_DIRECTORY",
    )


def of_loss(reason: str) -> str:
    """Return the remedy for losses of a watch, by the reason in its journal."""
    for words, remedy in _OF_LOSS:
        if any(word in reason for word in words):
            return remedy
    return _UNKNOWN.text


def debug_package(manager: str, package: str) -> str:
    """Return the name of the package with the debug files of a package; empty if not known."""
    if not package:
        return ""
    if manager == "dpkg":
        return "libc6-dbg" if package == "libc6" else f"{package}-dbgsym"
    return {"apk": f"{package}-dbg", "rpm": f"{package}-debuginfo"}.get(manager, "")


_INSTALL: Final = {
    "dpkg": "apt-get install {packages} && buildidfs scan tree /usr/lib/debug",
    "apk": "apk add {packages} && buildidfs scan tree /usr/lib/debug",
    "rpm": "dnf debuginfo-install {owners} && buildidfs scan tree /usr/lib/debug",
}


def install_debug_packages(
    manager: str, packages: Sequence[str], available: Collection[str] | None = None
) -> tuple[str, list[str]]:
    """Return the command that installs and captures the debug files of packages, and the names of
    the debug packages that are not ``available`` (None: unknown, so all may be).

    The command is empty if no package is left.
    """
    owners = {name: each for each in packages if (name := debug_package(manager, each))}
    lacking = [name for name in owners if available is not None and name not in available]
    names = [name for name in owners if name not in lacking]
    if not names:
        return "", lacking
    command = _INSTALL[manager].format(
        packages=" ".join(names), owners=" ".join(owners[name] for name in names)
    )
    return command, lacking


DEBIAN_ARCHIVE: Final = (
    "apt finds -dbgsym packages in the archive debian-debug (Ubuntu: ddebs.ubuntu.com)"
)


def debug_archive(manager: str, release: Mapping[str, str]) -> str:
    """Return the last part of a clause: where a package manager finds debug packages.

    ``release`` is os-release(5) of the host.
    """
    if manager != "dpkg":
        return ""
    codename = release.get("VERSION_CODENAME")
    if release.get("ID") != "debian" or not codename:
        return f"; {DEBIAN_ARCHIVE}"
    return (
        "; apt finds -dbgsym packages with source: deb http://deb.debian.org/debian-debug/"
        f" {codename}-debug main"
    )


_SERVERS: Final = {
    "debian": "https://debuginfod.debian.net",
    "ubuntu": "https://debuginfod.ubuntu.com",
}


def fetch_command(release: Mapping[str, str]) -> str:
    """Return the command that fetches the wanted files from the server of the distribution in
    ``release``; without a known one, from the configured servers.
    """
    server = _SERVERS.get(release.get("ID", ""))
    return f"DEBUGINFOD_URLS={server} {_FETCH}" if server else _FETCH
