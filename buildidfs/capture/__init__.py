# SPDX-License-Identifier: Apache-2.0
"""`base` is their interface, for `ingest`."""
