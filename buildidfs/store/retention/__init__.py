# SPDX-License-Identifier: Apache-2.0
"""Retention: blobs are removed to make room, and compressed when they are unused.

`eviction` decides how much must be removed, `plan` which blobs, `recapture` which of them this host
can give back. `removal` removes them and collects leftovers, `tally` counts and names them.
`compress` compresses unused blobs, `pins` has the build IDs that are kept. Outsiders use
`Store.retain`, `enforce`, `remove`, `collect`, `compress`, `pins` and `pin`. Nothing here finds or
mends faults.
"""
