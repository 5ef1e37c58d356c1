# SPDX-License-Identifier: Apache-2.0
"""Retention: blobs are removed to make room, and compressed when they are unused.

`eviction` decides how much must be removed, `plan` which blobs, and which of them are pinned or can
be captured again. `removal` removes them and collects leftovers, `compress` compresses unused
blobs. Outsiders use `Store.retain`, `enforce`, `remove`, `collect`, `compress`, `pins` and `pin`.
Nothing here finds or mends faults.
"""
