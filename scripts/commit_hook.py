# SPDX-License-Identifier: Apache-2.0
"""Hook of hatchling: puts the commit of a checkout into packages, as the file buildidfs/COMMIT.

`buildidfs --version` prints it. An sdist has the file already, and an editable installation has
none: there the command asks git.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NAME = "buildidfs/COMMIT"


class CommitHook(BuildHookInterface):
    """Adds the file to an sdist or wheel that is built from a checkout."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        top = Path(self.root)
        if version == "editable" or (top / NAME).exists() or not (top / ".git").exists():
            return
        # The user who builds trusts the checkout, even if it belongs to another one.
        command = ["git", "-c", "safe.directory=*", "-C", self.root, "describe", "--always"]
        options = ["--abbrev=12", "--dirty=+", "--exclude=*"]
        done = subprocess.run([*command, *options], stdout=subprocess.PIPE, text=True, check=True)
        self._directory = tempfile.TemporaryDirectory()
        path = Path(self._directory.name, "COMMIT")
        path.write_text(done.stdout)
        path.chmod(0o644)
        build_data["force_include"][str(path)] = NAME
