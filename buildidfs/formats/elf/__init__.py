# SPDX-License-Identifier: Apache-2.0
"""ELF files: `identify` gives the build ID, and the use of a file for debuggers.

`header` has the layouts that all other modules use, `sections` reads contents of sections,
`units` and `minidebug` decode particular sections, `core` finds the files that a crashed
process had mapped. No input makes a decoder raise; an exception of the caller's ``read_at`` passes
through.
"""
