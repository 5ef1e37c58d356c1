# SPDX-License-Identifier: Apache-2.0
"""The use case of `buildidfs watch`: it wires catcher, scans and pipeline on one store.

`watch.Watch` runs them and tells how they do (`state`); `rescans` decides when processes are
looked at. Only the command line and the service use it; it knows no output.
"""
