# SPDX-License-Identifier: Apache-2.0
"""Reads of the index: build IDs and artifacts, paths, containers, the journal, pins.

`environment` wraps LMDB, `queries` finds rows, `ranking` says which variant is served. Outsiders
reach these as parts of a `Store` (``store.index``, ``store.paths``, ...). Rows are unpacked by
`schema` alone. Nothing here knows of commits, retention or faults.
"""
