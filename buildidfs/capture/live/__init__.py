# SPDX-License-Identifier: Apache-2.0
"""Files that are mapped executable anywhere on the host, caught before their process may end.

`client.Watcher` starts the catcher, a process of its own (`catcher`): it reads the kernel's events
(`event_rings`), pins each new file (`grabber`, `identifier`), also if its process is gone already
(`vanished_files`), and sends it over a socket (`protocol`). `sightings` says where a caught file
was seen, and `pending_files` holds it, open, until it is copied. None of these knows the store.
"""
