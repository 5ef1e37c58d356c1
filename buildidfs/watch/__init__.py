# SPDX-License-Identifier: Apache-2.0
"""The daemon: it follows what processes map, and keeps a store and its helpers running.

`daemon.Watch` runs `catcher_client`, which finds the place of each caught file, the scans and the
`pipeline` on one store. `jit` follows generated code, `history_writer` counts, `state` is what the
watch reports about itself, and `metrics` publishes it. `up` starts and finds the processes of a
store, and keeps them running; `status` alone judges them.

Only the command line and the page use it; it writes no output.
"""
