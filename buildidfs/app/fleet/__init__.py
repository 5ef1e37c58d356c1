# SPDX-License-Identifier: Apache-2.0
"""The fleet: push the files of a store to a bucket, and answer questions about all hosts.

`push` uploads to a bucket, once or after each commit (`changes`). `ledger` remembers what was
uploaded, `questions` reads the manifests of all hosts. `fetch` gets missing files from upstream
servers.
"""

from typing import Final

NO_BUCKET: Final = "no bucket is configured: set [remote] url in buildidfs.toml(5)"
