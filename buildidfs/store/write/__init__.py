# SPDX-License-Identifier: Apache-2.0
"""Writes within one transaction: rows for captures and sightings are added, changed and removed.

`transaction.Recorder` records a batch and uses a writer for each group of tables; `uses` keeps the
order of eviction, `provenance` the data beside a blob. Outsiders call `Store.commit`. Nothing here
makes room or informs listeners.
"""
