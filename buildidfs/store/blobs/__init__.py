# SPDX-License-Identifier: Apache-2.0
"""Files named by their SHA-256: staged and synced, opened and verified, compressed.

`files` has the directory ``blobs/`` and staged files, `verify` opens a blob (`Blob`) only if its
bytes are those that were captured, `zstd` reads and writes compressed blobs. Outsiders use
`Store.open_blob` and `Store.stage`. Nothing here writes rows or knows of build IDs.
"""
