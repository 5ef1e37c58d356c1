# SPDX-License-Identifier: Apache-2.0
"""Archive formats of packages: ar, tar, cpio, rpm, seekable zstd."""
