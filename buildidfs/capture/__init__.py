# SPDX-License-Identifier: Apache-2.0
"""The scanners and the catcher, which find files and pin them; `base` is their interface for
`ingest`.
"""
