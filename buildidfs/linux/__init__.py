# SPDX-License-Identifier: Apache-2.0
"""One file per kernel interface: thin, typed, raises OSError, knows no build IDs.

What a kernel can do is found out by asking it and catching the answer, never from its version.
"""
