# SPDX-License-Identifier: Apache-2.0
"""The ELF files in packages and other archives, read without unpacking them to a disk.

`packages.PackageScanner` is for commands. `image` uses the rest: `stream` gives the decompressed
bytes of an archive in order and within limits, `elf_members` picks the ELF files of its members.
`formats.archive` decodes them; nothing here knows what an image is.
"""
