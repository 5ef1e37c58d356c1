# SPDX-License-Identifier: Apache-2.0
"""buildidfs.serve.messages and options: what requests and addresses mean."""

from __future__ import annotations

import pytest

from buildidfs.errors import UsageError
from buildidfs.serve import messages
from buildidfs.serve.messages import BadRequest
from buildidfs.serve.server import Address, parse_address


@pytest.mark.parametrize(
    ("target", "meaning"),
    [
        (b"/", (b"/", b"")),
        (b"/a%20b?x=%20", (b"/a b", b"x=%20")),
        (b"//a//b", (b"/a//b", b"")),
        (b"/%2e%2e/%2Fx", (b"/..//x", b"")),
    ],
)
def test_target(target: bytes, meaning: tuple[bytes, bytes]) -> None:
    assert messages.parse_target(target) == meaning


@pytest.mark.parametrize("target", [b"", b"a", b"*", b"/%", b"/%4", b"/%zz", b"/%00", b"/a\0b"])
def test_target_that_means_nothing(target: bytes) -> None:
    with pytest.raises(BadRequest):
        messages.parse_target(target)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (b"zstd", True),
        (b"gzip, zstd;q=0.1", True),
        (b"ZSTD", True),
        (b"*", True),
        (b"zstd;q=0", False),
        (b"*, zstd;q=0.0", False),
        (b"gzip", False),
        (b"", False),
        (b"zstd;level=3", False),
    ],
)
def test_coding(value: bytes, wanted: bool) -> None:
    assert messages.accepts_zstd(value) is wanted


def test_header_cannot_end_before_its_end() -> None:
    assert (
        messages.header_text(b"a\r\nX: y\x1b[0m \xc3\xa4")
        == rb"a\x0d\x0aX: y\x1b[0m " + b"\xc3\xa4"
    )


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:8002", Address("127.0.0.1", 8002)),
        (":8002", Address("", 8002)),
        ("[::1]:80", Address("::1", 80)),
        ("host.example:1", Address("host.example", 1)),
        ("unix:/run/x", Address(path="/run/x")),
    ],
)
def test_address(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert parse_address(str(address)) == address


@pytest.mark.parametrize("text", ["", "8002", "host", "::1:80", "host:65536", "host:-1", "unix:"])
def test_text_that_is_no_address(text: str) -> None:
    with pytest.raises(UsageError, match="not an address"):
        parse_address(text)
