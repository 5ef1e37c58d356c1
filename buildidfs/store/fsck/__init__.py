# SPDX-License-Identifier: Apache-2.0
"""Faults of a store: find and repair them, or make a new index from the blobs."""
