# SPDX-License-Identifier: Apache-2.0
"""Faults of a store: found, mended, and an index made again from the blobs."""
