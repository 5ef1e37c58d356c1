# SPDX-License-Identifier: Apache-2.0
"""The format on disk: tables, keys and rows. Nothing else packs or unpacks a row."""
