# SPDX-License-Identifier: Apache-2.0
"""The scanners of the host apart from processes and archives: one pass each.

`tree` takes directories and single files, `kernel` the running kernel and installed ones,
`by_build_id` files that profiles and cores name, `core` and `perf_data` read those for names.
"""
