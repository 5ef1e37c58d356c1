# SPDX-License-Identifier: Apache-2.0
"""The index as it is read."""
