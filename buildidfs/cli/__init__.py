# SPDX-License-Identifier: Apache-2.0
"""The command line: the only place that reads argv, the environment and the terminal.

`main` names every command and imports its module when it is called, so that ``list`` does not pay
for the imports of ``mount``. A command parses its options, calls `buildidfs.app`, and prints the
values it gets back with `output`. `common` has the options and settings that commands share.

Outsiders use `main.main` only. No module here knows lmdb, pyfuse3 or trio.
"""
