# SPDX-License-Identifier: Apache-2.0
"""Names and lines that Go programs have in themselves, as a debug file.

`gopclntab` reads the table of functions, `lines` its lines, and `debug_file` makes a debug file of
both. Callers use `debug_file` only. Nothing here opens files.
"""
