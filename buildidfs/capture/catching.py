# SPDX-License-Identifier: Apache-2.0
"""The program that `watcher.Watcher` starts: a catcher, and with it its guard if execs wait for it.

Arguments: the descriptor of a socket (see `messages`), `messages.Options` as JSON, and the process
that started it, without which it does not live on.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import socket
import sys
import threading

import msgspec

from buildidfs.capture import messages
from buildidfs.capture.catcher import Catcher
from buildidfs.capture.messages import Failed, Options
from buildidfs.errors import CapabilityError
from buildidfs.linux import capabilities, parents, scheduling

# Of two threads that have something to do, the one that waits gets its turn after this.
_SWITCH_INTERVAL_S = 0.00002
_STACK_BYTES = 256 << 10
_PRIVILEGE = frozenset((errno.EACCES, errno.EPERM))


def main(argv: list[str]) -> int:
    """Catch until the other end of the socket is closed."""
    sock = socket.socket(fileno=int(argv[0]))
    options = msgspec.json.decode(argv[1], type=Options)
    owner = int(argv[2])
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
        parents.end_with(owner, signal.SIGKILL)
        if options.strict:
            return _strictly(sock, options, owner)
        Catcher(sock).run()
    except (OSError, CapabilityError) as error:
        _tell(sock, error)
    return 0


def _strictly(sock: socket.socket, options: Options, owner: int) -> int:
    """Be the guard of a catcher, until it ends. Raises `CapabilityError`, OSError."""
    from buildidfs.capture import marks
    from buildidfs.capture.closer import Closer
    from buildidfs.capture.guard import EXIT_HUNG, Heartbeat, run_guarded
    from buildidfs.capture.met import Met
    from buildidfs.capture.strict import Strict

    group = marks.open_exec_group()

    def catch(heartbeat: Heartbeat) -> int:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        met = Met()
        own = (owner, os.getppid())
        try:
            strict = Strict(
                group,
                met.has_file,
                Closer(urgent=True),
                heartbeat=heartbeat,
                own=own,
                store_dev=options.store_dev,
            )
            Catcher(sock, met=met, strict=strict).run()
        except (OSError, CapabilityError) as error:
            _tell(sock, error)
        return 0

    code = run_guarded(catch, options.exec_wait, group)
    if code == EXIT_HUNG:
        _tell(sock, TimeoutError(f"it held up an exec for {options.exec_wait:g} s"))
    return code


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
        messages.send(sock, messages.encode(message))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
