# SPDX-License-Identifier: Apache-2.0
"""An image, wherever it is kept, and what to call it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from buildidfs.capture.image.layers import Layer
from buildidfs.errors import IntegrityError
from buildidfs.formats.archive.common import Damaged
from buildidfs.formats.container import oci
from buildidfs.model import Trust


class Image(msgspec.Struct, frozen=True):
    """An image, or what a container has written: ``layers``, the uppermost first.

    ``names`` and ``digests`` are what it may be asked for by; the first digest is its own.
    ``label`` and ``trust`` are for `model.Origin`. ``error`` says why there are no layers.
    """

    label: str
    digests: tuple[str, ...]
    names: tuple[str, ...] = ()
    layers: tuple[Layer, ...] = ()
    trust: Trust = Trust.PACKAGE
    error: IntegrityError | Damaged | OSError | None = None


def label(names: Sequence[str], digest: str) -> str:
    """What to call an image: by the first of its names, or by its digest."""
    return f"image:{oci.shown_name(names[0]) if names else oci.short(digest)}"
