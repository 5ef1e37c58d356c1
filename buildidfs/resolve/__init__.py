# SPDX-License-Identifier: Apache-2.0
"""The sources of a file: the store first, then the buckets of the fleet.

`tiered_store.TieredStore` is a store that also knows the files of buckets which were looked up. Its
index answers from memory and makes no request. `remote_files.RemoteFiles` makes the requests, and
is the only part that needs a library. Nothing here knows the names in a mount or a server.
"""

from typing import Final

FIRST_ORDINAL: Final = 1 << 30
"""The first number for build IDs that the store does not have. Such numbers are valid for the life
of the process.
"""
VARIANT: Final = (1 << 14) - 1
"""The variant number of each remote file."""
