# SPDX-License-Identifier: Apache-2.0
"""Functions, files and lines at addresses, from symbolizers of other projects.

- ``addresses``: `Symbolizer` names addresses of build IDs, and disassembles for the symbol server.
- ``script_filter``: puts names into the text of perf script.
- ``programs``: finds llvm-symbolizer, eu-addr2line and addr2line, and runs them confined.

Outsiders use `addresses.Symbolizer` and `programs.find`. Nothing here knows of profiles.
"""
