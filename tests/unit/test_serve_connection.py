# SPDX-License-Identifier: Apache-2.0
"""buildidfs.serve.connection: how a connection ends. tests/system has clients and answers."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from buildidfs.client_limits import Places, Rate
from buildidfs.serve.connection import Connection, HttpServer, Shared
from buildidfs.serve.counters import ServerCounters
from buildidfs.serve.messages import Response
from buildidfs.shares import Quota

PATIENCE_S = 20.0


def _shared(executor: ThreadPoolExecutor) -> Shared:
    site: Any = SimpleNamespace(
        counters=ServerCounters(1), refusal=lambda target, status, message: Response(status)
    )
    quota = Quota(8)
    return Shared(site, Rate(0), Places(quota), quota, executor, {}, 30)


@pytest.mark.parametrize("ends", ["before its answer", "after its answer"])
def test_connection_of_a_client_that_has_closed_is_not_kept(ends: str) -> None:
    """Nothing here looks for connections that are too slow, which would end it later."""
    with ThreadPoolExecutor(1) as executor:
        made: list[Connection] = []
        lost = asyncio.Event()

        class Watched(Connection):
            def connection_lost(self, error: BaseException | None) -> None:
                super().connection_lost(error)
                lost.set()

        class WatchedServer(HttpServer):
            def __call__(self) -> Connection:
                made.append(Watched(self))
                return made[-1]

        async def visit() -> bytes:
            accept = WatchedServer(_shared(executor), lambda transport: "client")
            server = await asyncio.get_running_loop().create_server(accept, "127.0.0.1", 0)
            address = server.sockets[0].getsockname()
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"nonsense\r\n\r\n")
            if ends == "before its answer":
                writer.write_eof()
            answer = await reader.read()
            if ends == "after its answer":
                writer.write_eof()
            await asyncio.wait_for(lost.wait(), PATIENCE_S)
            writer.close()
            server.close()
            await asyncio.sleep(0)
            assert not accept.connections
            return answer

        assert asyncio.run(visit()).startswith(b"HTTP/1.1 400 ")
        assert len(made) == 1
