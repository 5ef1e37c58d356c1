# SPDX-License-Identifier: Apache-2.0
"""The use case of `buildidfs watch`: catcher, scans and pipeline on one store.

`watch.Watch` runs them, scans processes if events were missed, and reports its `state`. Only the
command line and the service use it; it writes no output.
"""
