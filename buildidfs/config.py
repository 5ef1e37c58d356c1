# SPDX-License-Identifier: Apache-2.0
"""The settings of the program and the file they come from (buildidfs.toml(5)).

This module knows the values and their defaults. It reads no environment and no command line:
``cli`` hands over paths and overrides. Unknown keys are refused, because a misspelt key that is
silently ignored is a setting that an operator believes in.
"""

from __future__ import annotations

import os
from typing import Literal

import msgspec

from buildidfs.errors import UsageError

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


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of buildidfs.toml(5)."""

    store: StoreSettings = StoreSettings()
    container: ContainerSettings = ContainerSettings()
    mount: MountSettings = MountSettings()


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
