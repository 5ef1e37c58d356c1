# SPDX-License-Identifier: Apache-2.0
"""Decoders: bytes in, values out.

Nothing here opens, reads or asks the system anything; what must be read at some offset is asked
for through a function that the caller provides. Everything decoded may come from a hostile
container: sizes, counts and offsets found in it are claims, and cost is bounded for any input.
"""
