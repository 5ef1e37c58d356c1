# SPDX-License-Identifier: Apache-2.0
"""Limits of a store, and the removal of blobs."""
