# SPDX-License-Identifier: Apache-2.0
"""Profiles of perf: coverage, repair, capture."""
