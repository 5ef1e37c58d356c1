# SPDX-License-Identifier: Apache-2.0
"""Checks, scrubbing, and the daily upkeep of a store."""
