# SPDX-License-Identifier: Apache-2.0
"""Interfaces of the kernel: thin, typed, raise OSError, and know no build IDs.

A module tells what a kernel can do by asking it and catching the answer, never from its version.
"""
