# SPDX-License-Identifier: Apache-2.0
"""Scanners of the host other than those of processes and archives: one pass each.

`tree` scans directories and single files, `kernel` the running kernel and installed ones,
`by_build_id` the files that profiles and cores name; `core` and `profile.perf_data` open those.
"""
