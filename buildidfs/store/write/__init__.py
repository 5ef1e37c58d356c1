# SPDX-License-Identifier: Apache-2.0
"""One write transaction, and what it does to each table."""
