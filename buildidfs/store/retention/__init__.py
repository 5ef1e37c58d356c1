# SPDX-License-Identifier: Apache-2.0
"""Retention: blobs are removed to make room, and compressed when they are unused.

`eviction` decides how much must be removed, `eviction_order` which blobs first, `removal` removes
them and collects leftovers, `compress` compresses unused blobs, `pins` has the build IDs that are
kept. Outsiders use `Store.retain`, `enforce`, `remove`, `collect`, `compress`, `pins` and `pin`.
Nothing here finds or mends faults.
"""
