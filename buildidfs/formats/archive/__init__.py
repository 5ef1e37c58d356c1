# SPDX-License-Identifier: Apache-2.0
"""Archives as sequences of members: tar, and the ar and cpio archives of packages.

`common` has the types that all of them share: `ByteStream`, `Member`, `Damaged`. `seekable_zstd` is
the format of compressed blobs. Decoders know nothing of decompression or of files on a disk; the
scanners in `capture.archive` and `capture.image` do.
"""
