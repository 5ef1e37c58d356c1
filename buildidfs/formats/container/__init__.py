# SPDX-License-Identifier: Apache-2.0
"""Image formats, and what container engines record."""
