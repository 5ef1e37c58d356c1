#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Print the results of scripts/test-kernels as Markdown: `table.py RESULTS NAME...`.

The results of a configuration are a directory with the file `date` and the file `rows`, whose lines
have a name, pass or fail, seconds and a reason, divided by tabs. With ``--write FILE``, the table
replaces the one between the marks in FILE, too.
"""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path
from typing import Final, NamedTuple

_BEGIN: Final = "<!-- results of make test-kernels -->\n"
_END: Final = "<!-- end of the results -->\n"
_LABELS: Final = {
    "install": "install of the package",
    "enable": "`systemctl enable --now`",
    "reboot": "reboot",
    "doctor": "`buildidfs doctor`",
    "status": "`buildidfs status`",
    "demo": "demo of README",
    "programs": "short programs on a tmpfs",
    "podman": "podman, with names",
    "crun": "crun",
    "bubblewrap": "bubblewrap",
    "private_tmp": "unit with PrivateTmp=",
    "root_image": "unit with RootImage=",
    "module": "kernel module in a profile",
    "btrfs": "btrfs",
    "overlay": "overlay",
    "first_touches": "first touches",
    "coredump": "`coredumpctl debug`",
    "upgrade": "upgrade",
    "purge": "purge",
}


class Row(NamedTuple):
    """The result of one row of a configuration."""

    name: str
    state: str
    seconds: int
    reason: str


class Configuration(NamedTuple):
    """What one configuration gave."""

    name: str
    date: str
    rows: dict[str, Row]

    def kernel(self) -> str:
        """Return the release of the kernel."""
        return self.rows["kernel"].state if "kernel" in self.rows else "did not boot"

    def cell(self, name: str) -> str:
        """Return the text for a row of the table."""
        row = self.rows.get(name)
        if row is None:
            return "not run"
        return row.state if row.state == "pass" else f"**{row.state}**"

    def minutes(self) -> str:
        """Return the time of all rows."""
        return str(round(sum(row.seconds for row in self.rows.values()) / 60))


def read(directory: Path) -> Configuration:
    """Read the results of one configuration. Raises OSError, ValueError and TypeError."""
    rows = {}
    for line in (directory / "rows").read_text().splitlines():
        name, state, seconds, reason = line.split("\t")
        rows[name] = Row(name, state, int(seconds), reason.strip())
    return Configuration(directory.name, (directory / "date").read_text().strip(), rows)


def table(found: list[Configuration]) -> str:
    """Return the table, and below it the kernels and the reasons that the rows gave."""

    def line(label: str, cells: list[str]) -> str:
        return "| " + " | ".join([label, *cells]) + " |"

    lines = [
        line("", [each.name for each in found]),
        "|---" * (len(found) + 1) + "|",
        line("date", [each.date for each in found]),
        *(line(label, [each.cell(name) for each in found]) for name, label in _LABELS.items()),
        line("minutes", [each.minutes() for each in found]),
        "",
    ]
    for each in found:
        lines.append(f"- {each.name}: Linux {each.kernel()}")
        for row in each.rows.values():
            if row.name != "kernel" and (row.state == "fail" or row.name == "first_touches"):
                text = f"- {_LABELS.get(row.name, row.name)}: {row.state}: {row.reason}"
                lines += textwrap.wrap(
                    text, 98, initial_indent="  ", subsequent_indent="    ",
                    break_long_words=False, break_on_hyphens=False,
                )  # fmt: skip
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the table of those configurations that have results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", type=Path, metavar="FILE")
    parser.add_argument("results", type=Path)
    parser.add_argument("names", nargs="+")
    options = parser.parse_args()
    found = [options.results / name for name in options.names]
    text = table([read(each) for each in found if (each / "rows").exists()])
    print(text, end="")
    if options.write is not None:
        before, _, rest = options.write.read_text().partition(_BEGIN)
        options.write.write_text(f"{before}{_BEGIN}\n{text}\n{_END}{rest.partition(_END)[2]}")


if __name__ == "__main__":
    main()
