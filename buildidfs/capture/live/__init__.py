# SPDX-License-Identifier: Apache-2.0
"""Live capture: the catcher process, and the client that owns it."""
