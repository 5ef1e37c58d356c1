# SPDX-License-Identifier: Apache-2.0
"""buildidfs.client_limits: the names by which a server at a loopback address may be called."""

from __future__ import annotations

import pytest

from buildidfs.client_limits import host_and_port, is_loopback, is_own

NAMES = frozenset(("debug.example.com",))


@pytest.mark.parametrize(
    "header",
    [
        b"", b"127.0.0.1:8002", b"localhost:8002", b"localhost", b"LocalHost.", b"a.localhost:1",
        b"a-1.b_2.localhost", b"[::1]:8002", b"[::1]", b"192.168.1.7:80",
        b"debug.example.com", b"Debug.Example.Com:443",
    ],
)  # fmt: skip
def test_local_literal_and_configured_names_are_own(header: bytes) -> None:
    assert is_own(header, NAMES)


@pytest.mark.parametrize(
    "header",
    [
        b"evil.example", b"evil.example:8002", b"localhost.evil.example", b"notlocalhost",
        b"127.0.0.1.evil.example:8002", b"127.0.0.1, evil.example", b"evil.example, localhost",
        b"x@127.0.0.1", b"debug.example.com.evil.example", b"\xff\xfe", b":8002", b" ",
        b"localhost:80:80", b"[fe80::1%evil.example]:8002", b"[::1%]", b"fe80::1%evil.example",
        b"[127.0.0.1]", b"::1", b"\xe9.localhost", b".localhost", b"a b.localhost", b"a..localhost",
        b"evil.example/.localhost", b"user@a.localhost", b"[::1", b"\xb2.0.0.1",
    ],
)  # fmt: skip
def test_other_names_are_not_own(header: bytes) -> None:
    assert not is_own(header, NAMES)


@pytest.mark.parametrize(
    ("address", "is_local"),
    [
        ("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("::ffff:127.0.0.1", True),
        ("0.0.0.0", False), ("::", False), ("192.168.1.7", False), ("fe80::1%eth0", False),
    ],
)  # fmt: skip
def test_loopback_addresses_are_recognised(address: str, is_local: bool) -> None:
    assert is_loopback(address) == is_local


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("127.0.0.1:80", ("127.0.0.1", 80)), ("[::1]:65535", ("::1", 65535)), (":0", ("", 0)),
        ("a.example:1", ("a.example", 1)), ("::1:80", None), ("[::1:80", None), ("[]:80", None),
        ("80", None), ("a:65536", None), ("a:", None), ("a:-1", None),
    ],
)  # fmt: skip
def test_address_has_a_host_and_a_port(text: str, parsed: tuple[str, int] | None) -> None:
    assert host_and_port(text) == parsed
