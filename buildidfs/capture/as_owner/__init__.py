# SPDX-License-Identifier: Apache-2.0
"""Files that only their owner may read (FUSE), read by a process that became that user."""
