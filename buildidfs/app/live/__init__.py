# SPDX-License-Identifier: Apache-2.0
"""What `buildidfs watch` does."""
