# SPDX-License-Identifier: Apache-2.0
"""Where a file was seen: its container, its owner, and the users who could reach it."""
