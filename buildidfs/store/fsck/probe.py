# SPDX-License-Identifier: Apache-2.0
"""Whether an index can be read at all, found out by another process, which may die of it.

LMDB maps the file and believes what is in it: a page that is not there, or is damaged, is a signal
to whoever comes across it (SIGBUS, SIGSEGV, SIGABRT).
"""

from __future__ import annotations

import sys
from typing import Final

from buildidfs.store.schema.schema import TABLES

#: Reads every record, not too many in one transaction: somebody may be writing.
_READ_ALL: Final = """
import sys, lmdb
def opened(lock):
    size = int(sys.argv[1])
    return lmdb.open(".", readonly=True, lock=lock, max_dbs=64, map_size=size, readahead=False)
try:
    env = opened(True)
except lmdb.Error:
    env = opened(False)
for name in sys.argv[2:]:
    try:
        table = env.open_db(name.encode(), create=False)
    except lmdb.NotFoundError:
        continue  # for whoever opens the tables to say
    key = b""
    while key is not None:
        with env.begin(db=table) as txn:
            cursor = txn.cursor()
            there = cursor.set_range(key) if key else cursor.first()
            for count, (key, value) in enumerate(cursor if there else ()):
                if count == 100000:
                    break
            else:
                key = None
"""


def is_readable(directory: bytes, map_size: int) -> bool:
    """Whether every record in the index in a directory can be read; takes as long as that does."""
    import subprocess  # only for a store that looks damaged, or is to be checked

    command = [sys.executable, "-I", "-c", _READ_ALL, str(map_size), *TABLES]
    done = subprocess.run(command, cwd=directory, capture_output=True, check=False)
    return done.returncode == 0
