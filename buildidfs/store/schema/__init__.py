# SPDX-License-Identifier: Apache-2.0
"""The format on disk: directories, tables, keys and rows.

`schema` defines it; `locations` has rows of places and of the journal, `containers` those of
containers. No other package defines how a row is packed, and nothing here reads a table.
"""
