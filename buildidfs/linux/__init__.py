# SPDX-License-Identifier: Apache-2.0
"""Interfaces of the kernel: thin and typed; they raise OSError, and know no build IDs.

A module finds out what the kernel supports by trying a call and catching the error, never from its
version.
"""
