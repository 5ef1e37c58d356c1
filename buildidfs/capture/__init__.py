# SPDX-License-Identifier: Apache-2.0
"""Where binaries are seen. A scanner makes one pass and yields pinned files; it knows no store."""
