# SPDX-License-Identifier: Apache-2.0
"""Files named by their SHA-256: staged, synced, compressed, verified, opened."""
