# SPDX-License-Identifier: Apache-2.0
"""The command line: the only place that reads argv, the environment and the terminal.

One command, one file. Sub-commands are imported when they are called, so that ``list`` does not
pay for what ``mount`` needs.
"""
