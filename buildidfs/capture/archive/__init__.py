# SPDX-License-Identifier: Apache-2.0
"""Archives as streams of members, and the scanner of packages."""
