# SPDX-License-Identifier: Apache-2.0
"""Many hosts, one bucket: push what a store holds, and answer questions about all hosts.

`push` uploads to a bucket, `symbol_push` to a server of profiles; `uploader` has what both share.
`ledger` remembers what was uploaded, `questions` reads the manifests of all hosts.
`fetch` gets what a store lacks from upstream servers.
"""

from typing import Final

NO_BUCKET: Final = "no bucket is configured: set [remote] url in buildidfs.toml(5)"
