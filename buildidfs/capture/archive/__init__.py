# SPDX-License-Identifier: Apache-2.0
"""Packages and other archives: the ELF files in them, without unpacking them to a disk.

`packages.PackageScanner` is for commands. `image` uses the rest: `stream` gives the decompressed
bytes of an archive in order and within limits, `elf_members` picks the ELF files of its members.
`formats.archive` decodes them; nothing here knows what an image is.
"""
