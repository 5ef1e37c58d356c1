# SPDX-License-Identifier: Apache-2.0
"""Where in a bzImage the payload is."""

from __future__ import annotations

import pytest

from buildidfs.formats import kernel_image
from buildidfs.model import ByteRange
from tests.support.elf.kernels import bzimage_file


def test_payload() -> None:
    image = bzimage_file(b"payload")
    found = kernel_image.payload(image[: kernel_image.HEAD_SIZE], len(image))
    assert found is not None
    assert image[found.offset : found.offset + found.size] == b"payload"


def test_no_number_of_sectors_means_four() -> None:
    image = bytearray(bzimage_file(b"payload", sectors=4))
    image[0x1F1] = 0
    assert kernel_image.payload(bytes(image), len(image)) == ByteRange(5 * 512 + 16, 7)


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (0x1FE, b"\0"),  # the boot flag
        (0x202, b"hDRs"),
        (0x206, b"\x07\x02"),  # the protocol before there was a payload to be found
        (0x248, b"\xff\xff\xff\xff"),
        (0x24C, b"\xff\xff\xff\xff"),
        (0x24C, bytes(4)),
    ],
)
def test_other_files_and_truncated_kernels(at: int, value: bytes) -> None:
    image = bytearray(bzimage_file(b"payload"))
    assert kernel_image.payload(bytes(image), len(image)) is not None
    image[at : at + len(value)] = value
    assert kernel_image.payload(bytes(image), len(image)) is None
    assert kernel_image.payload(bytes(image[:0x24F]), len(image)) is None
