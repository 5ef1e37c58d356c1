# SPDX-License-Identifier: Apache-2.0
"""The scanner of container images: layouts, saved archives, storage of engines."""
