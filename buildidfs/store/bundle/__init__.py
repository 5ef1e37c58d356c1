# SPDX-License-Identifier: Apache-2.0
"""Bundles: one file that is an archive and can be read as a store."""
