# SPDX-License-Identifier: Apache-2.0
"""The settings of the program and the file they come from (buildidfs.toml(5)).

This module knows the values and their defaults. It reads no environment and no command line:
``cli`` hands over paths and overrides. Unknown keys are refused, because a misspelt key that is
silently ignored is a setting that an operator believes in.
"""

from __future__ import annotations

import os
import re
from typing import Annotated, Literal

import msgspec

from buildidfs.errors import UsageError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?B|)", re.IGNORECASE)

Namespace = Literal["net", "uts", "ipc", "pid", "user", "mnt", "cgroup"]


class StoreSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[store]``: where captured bytes are kept. An empty path means the default place."""

    path: str = ""


class ContainerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[container]``: a process is in a container when every namespace named is not init's."""

    namespaces: tuple[Namespace, ...] = ("mnt",)


class MountSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """``[mount]``: options that ``buildidfs mount`` adds to those of its command line."""

    options: tuple[str, ...] = ()
    gdb_scripts: Literal["zero", "keep"] = "zero"


class CaptureSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """``[capture]``: ``fuse_as_owner`` reads files on FUSE filesystems of other users, which root
    may not read, as the user who mounted them.
    """

    fuse_as_owner: bool = False


class WatchSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """``[watch]``: defaults of the options of ``buildidfs watch``.

    A file that is not copied yet is kept open for ``pin_seconds``, and all of them together may
    have ``pin_bytes``. ``exec_wait`` is the longest, in seconds, that ``strict`` holds up an exec.
    """

    strict: bool = False
    exec_wait: Annotated[float, msgspec.Meta(ge=0.05, le=10)] = 0.2
    pin_seconds: Annotated[float, msgspec.Meta(ge=0.1, le=3600)] = 30
    pin_bytes: int | str = 2 << 30
    exclude: tuple[str, ...] = ()


class UpSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """``[up]``: what ``buildidfs up`` runs; an empty mount point means /buildid."""

    mountpoint: str = ""


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of buildidfs.toml(5)."""

    store: StoreSettings = StoreSettings()
    container: ContainerSettings = ContainerSettings()
    mount: MountSettings = MountSettings()
    capture: CaptureSettings = CaptureSettings()
    watch: WatchSettings = WatchSettings()
    up: UpSettings = UpSettings()


def size(value: int | str) -> int:
    """Bytes from a number, or from text such as ``512MiB``, ``2G``, ``1.5 GB``.

    K, M, G and T are powers of 1024 with or without "iB", of 1000 with "B". Raises `UsageError`.
    """
    if isinstance(value, int):
        return value
    found = _SIZE.fullmatch(value.strip())
    if found is None:
        raise UsageError(f"not a size: {value!r}; try 512MiB or 2G")
    number, unit, suffix = found.groups()
    base = 1000 if suffix.upper() == "B" and unit else 1024
    return int(float(number) * base ** " KMGT".index(unit.upper() or " "))


def parse(text: str, name: str) -> Settings:
    """Settings from the text of a configuration file; ``name`` is for messages.

    Raises `UsageError` naming the file and the key at fault.
    """
    import tomllib  # not before there is a file

    try:
        settings = msgspec.convert(tomllib.loads(text), Settings)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{name}: not valid TOML: {error}") from error
    except msgspec.ValidationError as error:
        raise UsageError(f"{name}: {error}") from error
    if not settings.container.namespaces:
        raise UsageError(f"{name}: container.namespaces names no namespace; try ['mnt']")
    try:
        size(settings.watch.pin_bytes)
    except UsageError as error:
        raise UsageError(f"{name}: watch.pin-bytes: {error}") from error
    return settings


def load(path: str | os.PathLike[str]) -> Settings:
    """Settings from a file; raises `UsageError` when it cannot be read or makes no sense."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(f"cannot read configuration file {os.fspath(path)}: {reason}") from error
    return parse(text, os.fspath(path))
