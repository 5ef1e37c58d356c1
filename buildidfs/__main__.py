# SPDX-License-Identifier: Apache-2.0
"""``python -m buildidfs`` is the ``buildidfs`` command."""

from buildidfs.cli.main import run

run()
