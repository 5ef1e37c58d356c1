# SPDX-License-Identifier: Apache-2.0
"""Scanners of what lies on disk: trees, kernels, single files, cores, profiles."""
