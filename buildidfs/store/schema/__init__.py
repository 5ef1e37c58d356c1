# SPDX-License-Identifier: Apache-2.0
"""The format on disk: directories, tables, keys and rows.

`schema` defines it; `locations` has rows of places and of the journal, `containers` those of
containers. Nothing else packs or unpacks rows, and nothing here reads a table.
"""
