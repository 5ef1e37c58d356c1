# SPDX-License-Identifier: Apache-2.0
"""Lines about the files of profiles and core files that have no build ID."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from buildidfs.cli.output import one_line, printable

if TYPE_CHECKING:
    from buildidfs.app.build_ids_in import Named

_SHOWN: Final = 20  # files that are named one by one


def tell(path: bytes, named: Named) -> bool:
    """Print on standard error what is not known of the file ``path``; True if that is anything.

    Files are printed with the samples that fell into them or were called from there.
    """
    if named.incomplete:
        click.echo(f"buildidfs: {one_line(named.incomplete)}", err=True)
    count = len(named.nameless)
    if count:
        files = f"{count} file{'' if count == 1 else 's'} without a build ID"
        click.echo(f"buildidfs: {printable(path)}: {files}", err=True)
    elif not named.paths:
        click.echo(f"buildidfs: {printable(path)} is about no file with a build ID", err=True)
    for each in named.nameless[:_SHOWN]:
        weight = "" if each.share is None else f"{each.share:.1f} % of the samples  "
        label = printable(each.container.encode("utf-8", "surrogateescape"))
        where = f" in {label}" if label else ""
        click.echo(f"    {weight}{printable(each.path)}{where}: {each.why}", err=True)
    if count > _SHOWN:
        click.echo(f"    and {count - _SHOWN} more", err=True)
    return bool(count or named.incomplete or not named.paths)
