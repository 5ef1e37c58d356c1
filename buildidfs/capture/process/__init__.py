# SPDX-License-Identifier: Apache-2.0
"""The files that running processes have mapped, found in /proc.

`scanner.ProcScanner` captures them, `mapped_by` finds the processes that map a build ID. `process`
is one pinned process, and `silent_processes` asks the questions that may wait for a process for
ever.
"""
