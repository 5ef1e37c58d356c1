# SPDX-License-Identifier: Apache-2.0
"""What a running process has mapped, found in /proc."""
