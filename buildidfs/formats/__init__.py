# SPDX-License-Identifier: Apache-2.0
"""Decoders: bytes in, values out.

`elf`, `perf`, `archive` and `container` hold the large formats; texts of /proc, ACLs, bundles and
outputs of symbolizers have a module each. All other packages call these modules directly.

Decoders do no I/O and know no store: a caller provides a function that returns the bytes at an
offset. All input may come from a hostile container. Sizes, counts and offsets in it are claims, and
time and memory are bounded for any input.
"""
