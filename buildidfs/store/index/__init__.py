# SPDX-License-Identifier: Apache-2.0
"""Reads of the index: build IDs and artifacts, paths, containers, the journal.

`environment` wraps LMDB, `queries` finds the rows of build IDs, `locations` finds the rows of
places, `ranking` decides which variant is served. Outsiders reach these as parts of a `Store`
(``store.index``, ``store.paths``, ...). `schema` and `location_rows` alone unpack rows. Nothing
here writes, nor knows of retention or faults.
"""
