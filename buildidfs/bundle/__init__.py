# SPDX-License-Identifier: Apache-2.0
"""Bundles: files of a store in one archive, to read or import on another machine.

`collect` chooses and imports them; `store.bundle` and `formats.bundle_archive` read and write the
archive.
"""
