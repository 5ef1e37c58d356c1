# SPDX-License-Identifier: Apache-2.0
"""ELF files, their notes, sections and segments, and core files."""
