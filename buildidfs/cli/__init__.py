# SPDX-License-Identifier: Apache-2.0
"""The command line: the only place that reads argv, the environment and the terminal.

`main` lists every command and imports its module when it is called, so that ``list`` does not
import the modules of ``mount``. A command parses its options, calls another room, and prints the
results with `output`. `common` has the options and settings that commands share.

Outsiders use `main.main` only. No module here knows lmdb, pyfuse3 or trio.
"""

import gc

# A command ends before there is garbage to collect; the imports alone, which begin after this,
# would cause dozens of collections.
gc.set_threshold(100_000, 20, 20)
