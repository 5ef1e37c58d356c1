# SPDX-License-Identifier: Apache-2.0
"""The performance bars of the project, measured side by side in one run: ``make bench``."""
