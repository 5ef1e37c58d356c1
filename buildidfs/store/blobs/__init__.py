# SPDX-License-Identifier: Apache-2.0
"""Files named by their SHA-256: staged and synced, opened and verified, compressed.

`files` has the directory ``blobs/`` and staged files, `verify` opens a blob (`Blob`) only if it is
what was captured, `zstd` reads and writes compressed ones. Outsiders use `Store.open_blob` and
`Store.stage`. Nothing here writes rows, nor knows what a build ID is.
"""
