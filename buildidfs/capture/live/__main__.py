# SPDX-License-Identifier: Apache-2.0
"""The program that `watcher.Watcher` starts: it runs a catcher.

Arguments: the descriptor of a socket (see `messages`) and the process that started it, which the
catcher does not outlive.
"""

from __future__ import annotations

import contextlib
import errno
import resource
import signal
import socket
import sys
import threading

from buildidfs.capture.live import protocol
from buildidfs.capture.live.catcher import Catcher
from buildidfs.capture.live.protocol import Failed
from buildidfs.errors import CapabilityError
from buildidfs.linux import capabilities, pdeathsig, scheduling

# Of two threads that have something to do, the one that waits gets its turn after this.
_SWITCH_INTERVAL_S = 0.00002
_STACK_BYTES = 256 << 10
_PRIVILEGE = frozenset((errno.EACCES, errno.EPERM))


def main(argv: list[str]) -> int:
    """Catch until the other end of the socket is closed."""
    sock = socket.socket(fileno=int(argv[0]))
    owner = int(argv[1])
    scheduling.name_thread(b"buildidfs-catch")
    # Meant for who started us, at a terminal or by systemd; we end when nobody listens any more.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    threading.stack_size(_STACK_BYTES)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        pdeathsig.end_with(owner, signal.SIGKILL)
        Catcher(sock).run()
    except (OSError, CapabilityError) as error:
        _tell(sock, error)
    return 0


def _tell(sock: socket.socket, error: OSError | CapabilityError) -> None:
    """Let the other end know why there is no catcher."""
    if isinstance(error, OSError):
        reason, privilege = error.strerror or str(error), error.errno in _PRIVILEGE
        if privilege:
            reason += f"; {capabilities.remedy('CAP_PERFMON', 'CAP_SYS_ADMIN')}"
        message = Failed(reason, privilege)
    else:
        message = Failed(str(error), privilege=True)
    with contextlib.suppress(OSError):  # nobody listens any more
        sock.setblocking(True)
        protocol.send(sock, protocol.encode(message))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
