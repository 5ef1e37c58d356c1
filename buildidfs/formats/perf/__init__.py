# SPDX-License-Identifier: Apache-2.0
"""perf: files of profiles, records of live events, and the output of perf script.

`headers`, `stream` and `records` read perf.data in this order; `address_spaces` finds the file at
an address of a process. `records.decode_ring` reads rings of live events, whose attributes
`attributes.pack_attr` makes. Nothing here knows which binary has a build ID: `app.profile` does.
"""
