# SPDX-License-Identifier: Apache-2.0
"""A file at a path, perhaps in a container: the common fields of answers.

In texts from strangers, bytes that are not UTF-8 are replaced; base64 beside the text keeps them.
"""

from __future__ import annotations

import base64
import re
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from buildidfs.model import ContainerNames


def utf8(raw: bytes) -> str:
    """Return a path as text; bytes that are not UTF-8 are replaced."""
    return raw.decode("utf-8", "replace")


def base64_of(raw: bytes) -> str | UnsetType:
    """Return a path in base64 if it is not UTF-8, else nothing."""
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return base64.b64encode(raw).decode()
    return UNSET


def raw(shown: str, encoded: str | UnsetType) -> bytes:
    """Return the bytes of a path from its text, and from `base64_of` of it."""
    return shown.encode() if encoded is UNSET else base64.b64decode(encoded)


def text(raw: bytes | str) -> str:
    """Return bytes or text of a stranger as text that can be encoded."""
    return utf8(raw.encode("utf-8", "surrogateescape") if isinstance(raw, str) else raw)


class Located(msgspec.Struct, frozen=True, kw_only=True):
    """A path as text, and in base64 if its bytes are not UTF-8."""

    path: str
    path_b64: str | UnsetType = UNSET

    @property
    def raw_path(self) -> bytes:
        """Return the path as bytes."""
        return raw(self.path, self.path_b64)


def path_fields(raw: bytes, name: str = "path") -> dict[str, Any]:
    """Return the field ``path``, and ``path_b64`` if the bytes are not UTF-8.

    ``name`` is used in place of ``path`` if it is given.
    """
    encoded = base64_of(raw)
    return {name: utf8(raw)} | ({} if encoded is UNSET else {f"{name}_b64": encoded})


_SUFFIX: Final = re.compile(r" (?:\(user \d+\)|in \S+)\Z")


def name_or_label(name: str, label: str) -> str:
    """Return the name of a container, or its label if no name is known.

    The end of a label that tells an imitation stays, because engines of users choose names.
    """
    return name + label.removeprefix(without_suffix(label)) if name else label


def without_suffix(label: str) -> str:
    """Return a label without the end that tells an imitation."""
    return _SUFFIX.sub("", label)


class InContainer(Located, frozen=True, kw_only=True):
    """A file in a container; see `Names.fields`. The label is empty for the host."""

    container: str
    container_name: str | None
    pod: str | None
    pod_namespace: str | None
    image: str | None

    @property
    def called(self) -> str:
        """Return the known parts of ``NAMESPACE/POD/NAME``; empty if no name is known."""
        parts = (self.container_name, self.pod, self.pod_namespace)
        return ContainerNames(*(part or "" for part in parts)).shown

    @property
    def container_called(self) -> str:
        """Return the name of the container, or its label; empty for the host."""
        return name_or_label(self.called, self.container)

    @property
    def where(self) -> str:
        """Return name, label and image, as far as they are known; ``the host`` for no label."""
        if not self.container:
            return "the host"
        if self.called:
            image = f", {self.image}" if self.image else ""
            return f"{self.called} ({self.container}{image})"
        return f"{self.container} ({self.image})" if self.image else self.container
