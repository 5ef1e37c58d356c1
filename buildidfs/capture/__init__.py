# SPDX-License-Identifier: Apache-2.0
"""The scanners: they find ELF files and yield them as pinned files; they know no store.

`base` is their interface, for `ingest`. `process` and `scan` have scanners of what is on the host,
`archive` and `image` of packages and images, `live` follows what is mapped from now on. They build
on `debug_files` (the companions of a binary), `walk` (directories), `elf_file` (open files),
`origin` (where a file was seen) and `unresponsive` (filesystems that may hang).
"""
