# SPDX-License-Identifier: Apache-2.0
"""Profiles of perf and the store: the build ID of each mapping, and the share that has names.

`reading` reads a profile and counts where samples fell; `match` finds build IDs for mappings by
path, inode and time; `scan` captures files that still exist; `repair` writes the profile anew.
Nothing here knows core files.
"""
