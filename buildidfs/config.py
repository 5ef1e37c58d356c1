# SPDX-License-Identifier: Apache-2.0
"""The settings of the program and their file (buildidfs.toml(5)).

This module knows the values and their defaults. It reads no environment and no command line:
``cli`` passes text and overrides. Unknown keys are refused, because an operator would believe that
a misspelt key has an effect.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args

import msgspec

from buildidfs.errors import UsageError
from buildidfs.model import fingerprint

_SHARE = re.compile(r"(\d{1,3}(?:\.\d{1,6})?)\s*%")
_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw]?)")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?B|)", re.IGNORECASE)

_Size = Annotated[int | str, msgspec.Meta(extra={"unit": "size"})]
_Limit = Annotated[int | str, msgspec.Meta(extra={"unit": "limit"})]
_Age = Annotated[int | str, msgspec.Meta(extra={"unit": "age"})]
_AGE_EXTRA: Final = {"unit": "age"}
"""The units of numbers and texts: `size`, `limit` and `seconds` convert them."""

Namespace = Literal["net", "uts", "ipc", "pid", "user", "mnt", "cgroup"]


class StoreSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[store]``: the directory for captured bytes. An empty path means the default directory."""

    path: str = ""


DEBUG_DIRECTORIES: Final = (
    "/usr/lib/debug",
    "/usr/local/lib/debug",
    "/app/lib/debug",
    "/run/current-system/sw/lib/debug",
    "/run/current-system/profile/lib/debug",
    "/nix/var/nix/profiles/default/lib/debug",
)
"""The directories with debug files of distributions, of flatpak (/app), NixOS and Guix."""


class ContainerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """``[container]``: a process is in a container if all these namespaces differ from init's.

    Debug files are searched in ``debug_directories`` of each root, and in those that the
    configuration of gdb in that root names.
    """

    namespaces: tuple[Namespace, ...] = ("mnt",)
    debug_directories: tuple[Annotated[str, msgspec.Meta(pattern=r"\A/[^\0]{0,4000}\Z")], ...] = (
        DEBUG_DIRECTORIES
    )


class MountSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """``[mount]``: options that ``buildidfs mount`` adds to those of its command line.

    With ``list_all``, files are also listed for users who may not read them. With ``fetch``,
    missing debuginfo is fetched from the servers of ``[upstream]`` when it is opened.
    """

    options: tuple[str, ...] = ()
    gdb_scripts: Literal["zero", "keep"] = "zero"
    list_all: bool = False
    fetch: bool = False


class WatchSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """``[watch]``: defaults of the options of ``buildidfs watch``.

    ``metrics`` is an address or a FILE.prom, empty for none. A file that is not copied yet is kept
    open for ``pin_seconds`` at most. All such files together may have ``pin_bytes`` at most.
    """

    pin_seconds: Annotated[float, msgspec.Meta(ge=0.1, le=3600, extra=_AGE_EXTRA)] = 30
    pin_bytes: _Size = 2 << 30
    exclude: tuple[str, ...] = ()
    metrics: str = ""


class RetentionSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """``[retention]``: limits of a store, as sizes (`limit`) and ages (`seconds`).

    None is no limit, except for ``keep_free``, whose default depends on the filesystem. Blobs
    unused for ``compress_after`` are compressed; None is never.
    """

    max_size: _Limit | None = None
    keep_free: _Limit | None = None
    max_age: _Age | None = None
    min_age: _Age = 0
    compress_after: _Age | None = None


class CheckSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """``[check]``: the number of bytes of blobs per second that ``watch`` reads and verifies; 0 for
    none.
    """

    scrub_rate: _Size = 8 << 20


class TrustRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of ``[[trust.rules]]``: the trust in files that were seen at a path in a container.

    ``path`` and ``container`` are globs. None matches any; "" as a container matches files outside
    of containers.
    """

    level: Literal["unknown", "container", "package", "host"]
    path: str | None = None
    container: str | None = None


class TrustSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[trust]``: the first rule that fits decides the trust in a file. Without one, the place
    decides.
    """

    rules: tuple[TrustRule, ...] = ()


class UpSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """``[up]``: the programs of ``buildidfs up``; an empty mount point means /buildid."""

    mountpoint: str = ""


class ServeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """``[serve]``: defaults of the options of ``buildidfs serve``. If ``listen`` is set, ``up``
    runs a server.

    ``rate`` is the number of requests per second of one client, 0 for no limit. A client has
    ``timeout`` seconds to send a request and to take a part of the answer. ``fetch`` gets missing
    files from the servers of ``[upstream]``. With ``drop`` the page takes profiles and core files.
    ``home_redirect`` is the target for a browser that requests ``/``. ``hosts`` are the names by
    which a proxy calls a server at a loopback address.
    """

    listen: str = ""
    workers: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    cors: bool = False
    rate: Annotated[float, msgspec.Meta(ge=0)] = 500
    timeout: Annotated[float, msgspec.Meta(ge=1, le=3600, extra=_AGE_EXTRA)] = 30
    fetch: bool = True
    drop: bool = False
    home_redirect: Annotated[str, msgspec.Meta(pattern=r"\A([\x21-\x7e]{1,2000})?\Z")] = ""
    hosts: tuple[Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9._-]{1,253}\Z")], ...] = ()


TierTrust = Literal["unknown", "container", "package"]


class RemoteTier(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of ``[[remote.tiers]]``: a bucket that is read before ``[remote] url``, and the highest
    trust that its files get.
    """

    url: str
    trust: TierTrust = "container"


class RemoteSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """``[remote]``: the bucket that the hosts of a fleet push to.

    Files that not all users could read go to the bucket ``private``, or nowhere. ``rate`` is in
    bytes per second, 0 for no limit. With ``push``, ``up`` pushes captured files. Objects older
    than half of ``keep`` are touched as long as this host has the file; if ``keep`` is None, they
    are never touched.

    With ``read``, mounts and servers read files that the store lacks from ``tiers`` and from
    ``url``, whose files get the trust ``trust`` at most. They ask for a newer filter every
    ``refresh``.
    """

    url: str = ""
    private: str = ""
    read: bool = True
    trust: TierTrust = "container"
    tiers: tuple[RemoteTier, ...] = ()
    refresh: _Age = 60
    push: bool = False
    rate: _Size = 0
    keep: _Age | None = None


class UpstreamSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """``[upstream]``: servers for files that the store lacks, in the order in which they are asked.

    A server has ``timeout`` seconds to answer; the default is DEBUGINFOD_TIMEOUT, or 10. Opens of a
    mount and requests wait ``wait`` seconds. A file that no server has is not requested again for
    ``remember_absent``. ``offline`` skips all servers that need a network.
    """

    urls: tuple[str, ...] = ()
    timeout: Annotated[float, msgspec.Meta(ge=0.1, le=600, extra=_AGE_EXTRA)] | None = None
    wait: Annotated[float, msgspec.Meta(ge=0.1, le=600, extra=_AGE_EXTRA)] = 10
    max_size: _Size = 2 << 30
    remember_absent: _Age = 3600
    headers_file: str = ""
    offline: bool = False


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All settings in buildidfs.toml(5)."""

    store: StoreSettings = StoreSettings()
    container: ContainerSettings = ContainerSettings()
    mount: MountSettings = MountSettings()
    watch: WatchSettings = WatchSettings()
    retention: RetentionSettings = RetentionSettings()
    up: UpSettings = UpSettings()
    serve: ServeSettings = ServeSettings()
    check: CheckSettings = CheckSettings()
    trust: TrustSettings = TrustSettings()
    remote: RemoteSettings = RemoteSettings()
    upstream: UpstreamSettings = UpstreamSettings()


def marks(settings: Settings) -> dict[str, str]:
    """Return a hash of each section of the settings.

    A process registers those that it has started with, so `status` notices that they have changed.
    """
    return {
        name: fingerprint(msgspec.json.encode(getattr(settings, name)), 8).hex()
        for name in Settings.__struct_fields__
    }


_AT_LINE: Final = re.compile(r"\(at line (\d{1,9}),")
_UNQUOTED: Final = re.compile(r"""\s*([\w.-]+)\s*=\s*([^\s"'\\#{\[][^"'\\#]*?)\s*(?:#.*)?""")
"""A key of TOML with a value that is neither text, list nor table."""


def size(value: int | str) -> int:
    """Return bytes from a number, or from text such as ``512MiB``, ``2G``, ``1.5 GB``.

    K, M, G and T are powers of 1024 with or without "iB", and powers of 1000 with "B". Raises
    `UsageError`.
    """
    if isinstance(value, int):
        return value
    found = _SIZE.fullmatch(value.strip())
    if found is None:
        raise UsageError(f"not a size: {value!r}; try 512MiB or 2G")
    number, unit, suffix = found.groups()
    base = 1000 if suffix.upper() == "B" and unit else 1024
    try:
        return int(float(number) * base ** " KMGT".index(unit.upper() or " "))
    except OverflowError:
        raise UsageError(f"not a size that anything has: {value[:20]}...") from None


class Limit(NamedTuple):
    """A size: a number of bytes, or a ``share`` of the filesystem. The other field is 0."""

    bytes: int
    share: float = 0.0


def limit(value: int | str) -> Limit:
    """Return a size as in `size`, or a share of the filesystem such as ``80%``.

    Raises `UsageError`.
    """
    if isinstance(value, str) and (found := _SHARE.fullmatch(value.strip())):
        share = float(found[1]) / 100
        if share > 1:
            raise UsageError(f"not a share of the filesystem: {value!r}; try 80%")
        return Limit(0, share)
    try:
        given = size(value)
    except UsageError:
        raise UsageError(f"not a size: {str(value)[:20]!r}; try 50G or 80%") from None
    if given < 0:
        raise UsageError(f"not a size: {given}; try 50G or 80%")
    return Limit(given)


def seconds(value: int | str) -> int:
    """Return seconds from a number, or from text such as ``30d``, ``12h``, ``90m``, ``2w``.

    Text needs a unit unless it is ``0``: the writer of ``3`` may have meant days. Raises
    `UsageError`.
    """
    text = str(value).strip().lower()
    found = _AGE.fullmatch(text)
    if found is None or len(text) > 20:
        raise UsageError(f"not an age: {text[:20]!r}; try 30d or 12h")
    if isinstance(value, str) and not found[2] and float(found[1]):
        raise UsageError(f"an age needs a unit: {text!r}; try {text}d, {text}h, {text}m or {text}s")
    return int(float(found[1]) * _SECONDS[found[2]])


_CONVERTED: Final[dict[str, Callable[[Any], object]]] = {
    "size": size,
    "limit": limit,
    "age": seconds,
}


def unit_of(what: Any) -> str:
    """Return the unit in the type of a key: ``size``, ``limit`` or ``age``; empty for others."""
    metas = (each for kind in (what, *get_args(what)) for each in getattr(kind, "__metadata__", ()))
    return next((each.extra["unit"] for each in metas if each.extra), "")


def value_of(settings: Settings, key: str) -> Any:
    """Return the value of a key, ``section.key``."""
    section, _, name = key.partition(".")
    return getattr(getattr(settings, section), name.replace("-", "_"))


def parse(text: str, name: str) -> Settings:
    """Return the settings in the text of a configuration file; ``name`` is for messages.

    Raises `UsageError` with the file and the wrong key.
    """
    given = _tables(text, name)
    for complaint in _unknown_keys(given, Settings):
        raise UsageError(f"{name}: {complaint}")
    try:
        settings = msgspec.convert(given, Settings)
    except msgspec.ValidationError as error:
        raise UsageError(f"{name}: {_in_words(str(error))}") from error
    if not settings.container.namespaces:
        raise UsageError(f"{name}: container.namespaces names no namespace; try ['mnt']")
    remote = settings.remote
    public = (remote.url, *(tier.url for tier in remote.tiers))
    if remote.private and remote.private.rstrip("/") in {url.rstrip("/") for url in public}:
        raise UsageError(
            f"{name}: remote.private: files that not every user may read would be in the bucket"
            " of all others; name another bucket"
        )
    for key, what in known_keys().items():
        check, value = _CONVERTED.get(unit_of(what)), value_of(settings, key)
        try:
            _ = None if value is None or check is None else check(value)
        except UsageError as error:
            raise UsageError(f"{name}: {key}: {error}") from error
    return settings


def _tables(text: str, name: str) -> dict[str, Any]:
    """Return the tables of a TOML document. Raises `UsageError`."""
    import tomllib  # imported only if there is a file

    try:
        return tomllib.loads(text)
    except ValueError as error:  # also for a number with thousands of digits
        hint = _unquoted(text, str(error))
        raise UsageError(f"{name}: not valid TOML: {error}{hint}") from error
    except RecursionError:
        raise UsageError(f"{name}: not valid TOML: nested too deeply") from None


def _unquoted(text: str, message: str) -> str:
    """Return a hint if an error of TOML is about a value without quotes, else an empty text."""
    place = _AT_LINE.search(message)
    number = int(place[1]) if place is not None else 0
    lines = text.splitlines()
    found = _UNQUOTED.fullmatch(lines[number - 1]) if 0 < number <= len(lines) else None
    if found is None or not found[0].isprintable():
        return ""
    return f'; quote it: {found[1]} = "{found[2][:200]}"'


def known_keys(kind: type[msgspec.Struct] = Settings) -> dict[str, Any]:
    """Return the type of each key, ``section.key``, in the order of buildidfs.toml(5)."""
    keys: dict[str, Any] = {}
    for field in msgspec.structs.fields(kind):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            below = known_keys(field.type).items()
            keys |= {f"{field.encode_name}.{key}": what for key, what in below}
        else:
            keys[field.encode_name] = field.type
    return keys


def given_keys(text: str, name: str) -> frozenset[str]:
    """Return the keys that a text sets, ``section.key``. Raises `UsageError`."""
    tables = _tables(text, name)
    return frozenset(
        f"{section}.{key}"
        for section, values in tables.items()
        if isinstance(values, dict)
        for key in values
    )


_TABLES: Final[dict[str, type[msgspec.Struct]]] = {
    "trust.rules": TrustRule,
    "remote.tiers": RemoteTier,
}
"""The keys whose values are lists of tables."""


def _unknown_keys(given: dict[str, Any], kind: type[msgspec.Struct], at: str = "") -> Iterator[str]:
    """Yield a complaint about each unknown key."""
    fields = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    for key, value in given.items():
        what = fields.get(key)
        if key not in fields:
            yield _complaint(key, value, fields, at)
        elif isinstance(value, dict) and isinstance(what, type):
            if issubclass(what, msgspec.Struct):
                yield from _unknown_keys(value, what, key)
        elif isinstance(value, list) and f"{at}.{key}" in _TABLES:
            for table in value:
                if isinstance(table, dict):
                    yield from _unknown_keys(table, _TABLES[f"{at}.{key}"], f"[{at}.{key}]")


def _complaint(key: str, value: object, fields: Collection[str], at: str) -> str:
    """Return the complaint about an unknown key, with the most similar known one."""
    from difflib import get_close_matches

    shown = key[:40] if key.isprintable() else repr(key[:40])
    is_section = not at and isinstance(value, dict)
    complaint = f"unknown section [{shown}]" if is_section else f"unknown key {shown}"
    if at:
        complaint += f" in [{at}]"
    elif not is_section:
        complaint += " outside of a section"
    elsewhere = [known for known in known_keys() if known.endswith(f".{key}")]
    if elsewhere:
        return f"{complaint}; it belongs into [{elsewhere[0].rpartition('.')[0]}]"
    close = get_close_matches(key.replace("_", "-"), fields, 1, 0.7)
    form = "{}" if at else "[{}]"
    if close:
        return f"{complaint}; did you mean {form.format(close[0])}?"
    return f"{complaint}; there are {', '.join(map(form.format, fields))}"


_EXPECTED: Final = re.compile(r"Expected `(?P<kinds>[^`]+)`(?P<bound>.*?)(?:, got `(?P<got>\w+)`)?")
_KINDS: Final = {
    "bool": "true or false", "str": "text", "int": "a number", "float": "a number",
    "object": "a section", "array": "a list",
}  # fmt: skip


def _in_words(message: str) -> str:
    """Translate an error of msgspec into the terms of TOML."""
    complaint, _, place = message.partition(" - at `$.")
    key = place.removesuffix("`")
    if found := _EXPECTED.fullmatch(complaint):
        kinds = [_KINDS[kind] for kind in found["kinds"].split(" | ") if kind in _KINDS]
        wanted = " or ".join(dict.fromkeys(kinds)) or found["kinds"]
        got = f", not {_KINDS.get(found['got'], found['got'])}" if found["got"] else ""
        return f"{key}: it has to be {wanted}{found['bound']}{got}"
    if complaint.startswith("Invalid enum value"):
        of_rules = {
            f"{table}.{name}": what
            for table, kind in _TABLES.items()
            for name, what in known_keys(kind).items()
        }
        what = (known_keys() | of_rules).get(re.sub(r"\[(?:\d+|\.\.\.)\]", "", key))
        value = complaint.removeprefix("Invalid enum value ")
        return f"{key}: no such value: {value}; there are {_literals(what)}"
    complaint = complaint.replace("Object missing required field", "it lacks the key").replace(
        "`", ""
    )
    return f"{key}: {complaint}" if key else complaint


def _literals(what: Any) -> str:
    """Return the values of a Literal, or of a tuple of Literals."""
    values: list[str] = []
    for each in get_args(what):
        values += [each] if isinstance(each, str) else map(str, get_args(each))
    return ", ".join(values)
