# SPDX-License-Identifier: Apache-2.0
"""Images of containers: indexes, manifests, configurations, names, and layers.

Sources: the OCI image specification 1.1; Docker's "Image Manifest Version 2, Schema 2" and "Image
Specification v1.2" (what ``docker save`` writes); the reference grammar of distribution/reference.
"""

from __future__ import annotations

import hashlib
import re
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import msgspec

from buildidfs.formats.archive.common import Damaged

if TYPE_CHECKING:
    from collections.abc import Sequence

DOCUMENT_MAX: Final = 4 << 20
"""The largest index, manifest or configuration: registries accept no larger ones."""
DOCUMENTS_MAX: Final = 4096
"""The most manifests of an index, and the most layers of an image."""

_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128}")
_PREFIX: Final = re.compile(r"(?:sha256:|sha512:)?([0-9a-f]{4,128})")
_UNPRINTABLE: Final = re.compile(r"[^\w./:@+-]", re.ASCII)
_NAME_MAX: Final = 255
_SHORT: Final = 12

_IMAGE_CONFIGS: Final = frozenset(
    (
        "application/vnd.oci.image.config.v1+json",
        "application/vnd.docker.container.image.v1+json",
        "",
    )
)
_NAMES: Final = ("io.containerd.image.name", "org.opencontainers.image.ref.name")
_ATTESTATION: Final = "vnd.docker.reference.type"


class Platform(msgspec.Struct, frozen=True, kw_only=True):
    """The platform of an image, in Go's words; an empty ``variant`` stands for any.

    ``str()`` is fit to be shown on a terminal.
    """

    os: str = ""
    architecture: str = ""
    variant: str = ""

    def __str__(self) -> str:
        parts = (self.os, self.architecture, self.variant)
        return shown_name("/".join(part for part in parts if part))

    def takes(self, other: Platform) -> bool:
        """Return True if an image for ``other`` satisfies a request for this platform."""
        return (
            (self.os, self.architecture) == (other.os, other.architecture)
            and (not self.variant or not other.variant or self.variant == other.variant)
        )  # fmt: skip


Size = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class Descriptor(msgspec.Struct, frozen=True, rename="camel"):
    """A reference to a blob: ``size`` bytes with that digest, which is not validated here."""

    digest: str
    size: Size
    media_type: str = ""
    platform: Platform | None = None
    annotations: dict[str, str] | None = None

    @property
    def name(self) -> str:
        """Return the name of the image, if an index has it."""
        for key in _NAMES:
            if self.annotations and self.annotations.get(key):
                return self.annotations[key]
        return ""

    @property
    def is_attestation(self) -> bool:
        """Return True for an attestation, which describes another image."""
        return self.annotations is not None and _ATTESTATION in self.annotations

    @property
    def is_layer(self) -> bool:
        """Return True for a layer that can be read: a tar archive, or a layer of unknown kind."""
        kind = self.media_type
        return not kind or (".tar" in kind and not kind.endswith("+encrypted"))


class Document(msgspec.Struct, frozen=True, rename="camel"):
    """An index, with ``manifests``, or the manifest of an image, with ``config`` and ``layers``."""

    media_type: str = ""
    manifests: list[Descriptor] | None = None
    config: Descriptor | None = None
    layers: list[Descriptor] | None = None

    @property
    def is_image(self) -> bool:
        """Return True for the manifest of an image, not of another artifact."""
        return (
            self.manifests is None
            and self.layers is not None
            and self.config is not None
            and self.config.media_type in _IMAGE_CONFIGS
        )


class _RootFs(msgspec.Struct, frozen=True):
    diff_ids: list[str] = []


class Config(msgspec.Struct, frozen=True):
    """The configuration of an image. ``diff_ids`` are the digests of its layers before compression,
    the lowest first.
    """

    os: str = ""
    architecture: str = ""
    variant: str = ""
    rootfs: _RootFs = _RootFs()

    @property
    def platform(self) -> Platform:
        """Return the platform of the image."""
        return Platform(os=self.os, architecture=self.architecture, variant=self.variant)

    @property
    def diff_ids(self) -> list[str]:
        """Return the digests of the layers; raises `Damaged` for an invalid digest."""
        return [checked_digest(text) for text in self.rootfs.diff_ids]


class SavedImage(msgspec.Struct, frozen=True, rename="pascal"):
    """One image in manifest.json of ``docker save``: names of files in the archive."""

    config: str
    layers: list[str]
    repo_tags: list[str] | None = None


_Value = TypeVar("_Value")


def _decoded(data: bytes, kind: type[_Value], what: str) -> _Value:
    if len(data) > DOCUMENT_MAX:
        raise Damaged(f"{what} of more than {DOCUMENT_MAX} bytes")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Damaged(f"{what} that is none: {error}") from error


def document(data: bytes) -> Document:
    """Decode an index or a manifest; raises `Damaged`."""
    found = _decoded(data, Document, "a manifest")
    for listed in (found.manifests, found.layers):
        if listed is not None and len(listed) > DOCUMENTS_MAX:
            raise Damaged(f"a manifest that lists more than {DOCUMENTS_MAX} others")
    for descriptor in (*(found.manifests or ()), *(found.layers or ())):
        checked_digest(descriptor.digest)
    if found.config is not None:
        checked_digest(found.config.digest)
    return found


def config(data: bytes) -> Config:
    """Decode the configuration of an image; raises `Damaged`."""
    return _decoded(data, Config, "a configuration")


def saved(data: bytes) -> list[SavedImage]:
    """Decode the list of images of ``docker save``; raises `Damaged`."""
    found = _decoded(data, list[SavedImage], "a list of images")
    if len(found) > DOCUMENTS_MAX or any(len(image.layers) > DOCUMENTS_MAX for image in found):
        raise Damaged(f"a list of more than {DOCUMENTS_MAX} images or layers")
    return found


# --- digests -------------------------------------------------------------------------------------


def checked_digest(text: str) -> str:
    """Return ``text``; raises `Damaged` unless it is a SHA-256 or SHA-512, fit for a file name."""
    if _DIGEST.fullmatch(text) is None:
        raise Damaged(f"no digest that is understood: {text[:80]!r}")
    return text


def hasher(digest: str) -> hashlib._Hash:
    """Return a hash object for the algorithm of a checked digest."""
    return hashlib.new(digest.partition(":")[0])


def digest_of(data: bytes, kind: str) -> str:
    """Return the digest of some bytes, of the same kind as a checked digest, or ``sha256``."""
    kind = kind.partition(":")[0]
    return f"{kind}:{hashlib.new(kind, data).hexdigest()}"


def chain_ids(diff_ids: Sequence[str]) -> list[str]:
    """Return the chain ID of each layer, the lowest first: Docker's one ID for the layer and all
    layers below it.
    """
    return list(
        accumulate(diff_ids, lambda below, own: digest_of(f"{below} {own}".encode(), "sha256"))
    )


def short(digest: str) -> str:
    """Return the first digits of a digest, as people name images."""
    return digest.partition(":")[2][:_SHORT]


# --- names ---------------------------------------------------------------------------------------


def shown_name(name: str) -> str:
    """Return a name in printable characters."""
    return _UNPRINTABLE.sub("?", name[:_NAME_MAX])


def full_names(name: str) -> list[str]:
    """Return the full names, with registry and tag, for which a shorter name may stand.

    Docker's own registry comes first; Podman gives images that were built here the registry
    localhost.
    """
    domain, slash, rest = name.partition("/")
    given = slash and (set(domain) & {".", ":"} or domain == "localhost")
    if not given:
        domain, rest = "docker.io", name
    if ":" not in rest.rpartition("/")[2]:
        rest += ":latest"
    own = f"library/{rest}" if domain == "docker.io" and "/" not in rest else rest
    return [f"{domain}/{own}"] if given else [f"{domain}/{own}", f"localhost/{rest}"]


def is_meant(reference: str, names: Sequence[str], digests: Sequence[str]) -> bool:
    """Return True if ``reference`` selects the image with these names and digests.

    A reference is a name as docker(1) takes it, a digest or the beginning of a digest, or a name
    and a digest with ``@`` in between.
    """
    name, at, digest = reference.rpartition("@")
    if at:
        return _has_digest(digest, digests) and (not name or _has_name(name, names))
    return reference in names or _has_name(reference, names) or _has_digest(reference, digests)


def _has_name(name: str, names: Sequence[str]) -> bool:
    meant = full_names(name)
    return any(full_names(each)[0] in meant for each in names)


def _has_digest(text: str, digests: Sequence[str]) -> bool:
    found = _PREFIX.fullmatch(text)
    if found is None:
        return False
    if ":" in text:
        return any(digest.startswith(text) for digest in digests)
    return any(digest.rpartition(":")[2].startswith(found[1]) for digest in digests)


_MACHINES: Final = {
    "x86_64": ("amd64", ""), "aarch64": ("arm64", ""), "armv7l": ("arm", "v7"),
    "armv6l": ("arm", "v6"), "i686": ("386", ""), "i386": ("386", ""),
}  # fmt: skip


def platform_of(machine: str) -> Platform:
    """Return the platform of Linux on a machine, given its name in uname(2)."""
    architecture, variant = _MACHINES.get(machine, (machine, ""))
    return Platform(os="linux", architecture=architecture, variant=variant)


def parsed_platform(text: str) -> Platform | None:
    """Parse ``linux/arm64`` or ``linux/arm/v7``; return None for other text."""
    parts = text.split("/")
    if not 2 <= len(parts) <= 3 or not all(parts):
        return None
    return Platform(os=parts[0], architecture=parts[1], variant="".join(parts[2:]))


# --- layers --------------------------------------------------------------------------------------

_WHITEOUT: Final = b".wh."
_OPAQUE: Final = b".wh..wh..opq"
_BOOKKEEPING: Final = b"/.wh..wh."  # of aufs: the image has nothing of the layers below it
_DEEP: Final = 255
_EACH: Final = 100  # bytes that an entry takes besides its path

NAMES_MAX_BYTES: Final = 512 << 20
"""The most memory for the paths of all layers that are remembered at one time."""


def parents_of(path: bytes) -> frozenset[bytes]:
    """Return the directories above a path, up to the root."""
    found = []
    while len(path) > 1:
        path = path[: path.rfind(b"/")] or b"/"
        found.append(path)
    return frozenset(found)


def is_too_deep(path: bytes) -> bool:
    """Return True if a path has more directories than any real one."""
    return path.count(b"/") > _DEEP


class LayerNames:
    """The paths of one layer, from `common.installed`, and the paths that it hides in the layers
    below.

    A file hides the entry of lower layers at its path, with everything below it; a directory hides
    files, but not directories. A *whiteout*, an empty file called ``.wh.NAME``, hides NAME in lower
    layers; an *opaque* one, ``.wh..wh..opq``, hides the entries of lower layers in its directory.
    No container sees a whiteout, and a whiteout does not hide files of its own layer. Source: the
    OCI image specification, "Representing Changes".

    ``size`` estimates the bytes of memory that the paths take; methods that add a path raise
    `Damaged` if it exceeds ``room``.
    """

    __slots__ = ("_covered", "_directories", "_opaque", "_room", "size")

    def __init__(self, room: int = NAMES_MAX_BYTES) -> None:
        self._room = room
        self.size = 0
        self._covered: set[bytes] = set()
        self._directories: set[bytes] = set()
        self._opaque: set[bytes] = set()

    def note(self, path: bytes, directory: bool) -> bool:
        """Add a member; return False if it is a whiteout, which no container sees."""
        parent, _, name = path.rpartition(b"/")
        if name == _OPAQUE:
            self.clear(parent or b"/")
            return False
        if _BOOKKEEPING in path:
            return False
        if name.startswith(_WHITEOUT):
            self.remove(parent + b"/" + name[len(_WHITEOUT) :])
            return False
        self._add(self._directories if directory else self._covered, path)
        return True

    def remove(self, path: bytes) -> None:
        """Hide that path in the layers below."""
        self._add(self._covered, path)

    def clear(self, directory: bytes) -> None:
        """Hide the entries of that directory in the layers below."""
        self._add(self._opaque, directory)

    def _add(self, paths: set[bytes], path: bytes) -> None:
        self.size += len(path) + _EACH
        if self.size > self._room:
            raise Damaged("too many names in the layers of an image")
        paths.add(path)

    def hides(self, path: bytes) -> bool:
        """Return True if a file, not a directory, at that path of a lower layer is hidden.

        A path deeper than any real one is hidden, too, because each directory takes time.
        """
        return is_too_deep(path) or self.hides_any(path, parents_of(path))

    def hides_any(self, path: bytes, parents: frozenset[bytes]) -> bool:
        """Do as `hides`, with the directories above the path, which are the same for all layers."""
        if path in self._covered or path in self._directories:
            return True
        # Python goes through the smaller set, and most layers have few names.
        return not (self._covered.isdisjoint(parents) and self._opaque.isdisjoint(parents))
