# SPDX-License-Identifier: Apache-2.0
"""``buildidfs scan``: the group of one-pass captures."""

from __future__ import annotations

import click

from buildidfs.cli.common import LazyGroup, exit_status


@click.group(
    short_help="Capture binaries in one pass.",
    cls=LazyGroup,
    lazy={
        "proc": "scan_proc:scan_proc",
        "tree": "scan_tree:scan_tree",
        "kernel": "scan_kernel:scan_kernel",
        "perf-data": "scan_perf_data:scan_perf_data",
        "core": "scan_core:scan_core",
        "package": "scan_package:scan_package",
        "image": "scan_image:scan_image",
    },
    epilog=exit_status(
        ["buildidfs scan proc", "buildidfs scan tree /usr/lib/debug"],
        {3: "finished, but some inputs could not be read"},
    ),
)
def scan() -> None:
    """Capture binaries in one pass over a place where they are."""
