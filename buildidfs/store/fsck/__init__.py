# SPDX-License-Identifier: Apache-2.0
"""Faults of a store: found, mended, and an index made again from the blobs.

`check.Checker` (`Store.checker`) looks for faults by the rules for each table and reads blobs
(`scrub`), `repair` mends faults and rebuilds the index. Nothing below imports this.
"""
