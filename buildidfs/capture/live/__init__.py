# SPDX-License-Identifier: Apache-2.0
"""Files that are mapped executable anywhere on the host, caught before their process may end.

`watch.catcher_client` starts the catcher, a process of its own (`catcher`). The catcher reads the
kernel's events (`event_rings`), pins each new file (`grabber`, `catcher.Settler`), even if its
process is gone already (`process_table`), and sends it over a socket (`protocol`).
`watch.catcher_client` makes the sighting of a caught file, and `ingest.pending_files` holds the
file open until it is copied. None of the modules here knows the store.
"""
