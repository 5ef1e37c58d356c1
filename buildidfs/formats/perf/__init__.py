# SPDX-License-Identifier: Apache-2.0
"""perf: files of profiles, records of live events, and the output of perf script.

`headers`, `record_stream` and `records` read perf.data in this order; `address_spaces` finds the
file at an address of a process. `records.decode_ring` reads rings of live events, and
`attributes.pack_attr` makes the attributes of these events. Nothing here finds the build ID of a
file: `profile` does.
"""
