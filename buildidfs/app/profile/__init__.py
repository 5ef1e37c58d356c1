# SPDX-License-Identifier: Apache-2.0
"""Profiles of perf and the store: which build ID each mapping had, and what can be read of it.

`reading` takes a profile in and counts where samples fell; `match` finds build IDs for mappings by
path, inode and time; `scan` captures what is still there; `repair` writes the profile anew.
Nothing here knows core files.
"""
