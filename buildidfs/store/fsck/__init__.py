# SPDX-License-Identifier: Apache-2.0
"""Faults of a store: find them, mend them, or make a new index from the blobs."""
