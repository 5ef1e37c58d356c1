# SPDX-License-Identifier: Apache-2.0
"""``buildidfs scan image``: capture the ELF files in images of containers."""

from __future__ import annotations

import os

import click

from buildidfs.cli.common import AnyPath, Session, exit_status
from buildidfs.cli.output import one_line
from buildidfs.cli.summary import as_json, report
from buildidfs.errors import IncompleteError

_ROOTS = ("/var/lib/docker", "/var/lib/containers/storage", "/var/lib/containerd")
_ROOTS_OF_A_USER = ("docker", "containers/storage")  # below $XDG_DATA_HOME


@click.command(
    "image",
    epilog=exit_status(
        [
            "buildidfs scan image alpine:3.19 registry.example.org/app@sha256:0f5c3e8d1b2a",
            "buildidfs scan image ./layout saved.tar.gz /var/lib/docker",
            "buildidfs scan image --root /mnt/var/lib/containerd sha256:0f5c3e8d1b2a",
        ],
        {
            2: "no such image, or no such platform",
            3: "finished, but some images or files could not be read",
            10: "store error; 14 disk full",
            20: "an image does not have its digests; of that nothing was captured",
        },
    ),
)
@click.argument("images", metavar="REF|FILE...", nargs=-1, required=True, type=AnyPath())
@click.option(
    "--root",
    "roots",
    metavar="DIR",
    multiple=True,
    type=AnyPath(),
    help="Look for a REF here, and not where engines keep images.",
)
@click.option("--platform", metavar="OS/ARCH", help="Of images for several: this one, or all.")
@click.option("--again", is_flag=True, help="Read images that were read before, too.")
@click.option("--json", "json_", is_flag=True, help="Print the summary as one JSON object.")
@click.pass_obj
def scan_image(
    session: Session,
    images: tuple[str, ...],
    roots: tuple[str, ...],
    platform: str | None,
    again: bool,
    json_: bool,
) -> int:
    """Capture every ELF file that images of containers show, without running or unpacking them.

    A FILE is an OCI layout, an archive of one, what docker save or podman save has written, or the
    directory of an engine; of that all images are read, and what its containers have written. Any
    other word is a REF: the name, the ID or the digest of an image that an engine has.
    """
    from buildidfs.app import archives

    paths = [os.fsencode(word) for word in images if os.path.lexists(word)]
    references = [word for word in images if not os.path.lexists(word)]
    with session.open_store(create=True) as store, session.progress("Unpacking") as show:
        scan = archives.scan_images(
            store,
            paths,
            references,
            [os.fsencode(root) for root in roots or _existing_roots()],
            platform=platform,
            again=again,
            progress=show,
        )
    if json_:
        as_json(scan.summary, images=scan.images, unchanged=scan.unchanged)
    else:
        if not session.is_quiet:
            known = f", {scan.unchanged} of them unchanged" if scan.unchanged else ""
            click.echo(f"{scan.images} images{known}")
        report(scan.summary, quiet=session.is_quiet)
    for error in scan.corrupt[1:]:
        click.echo(f"buildidfs: {one_line(str(error))}", err=True)
    if scan.corrupt:
        raise scan.corrupt[0]
    return IncompleteError.exit_code if scan.summary.unreadable else 0


def _existing_roots() -> list[str]:
    """Where the engines of this user keep images, as far as there are any."""
    places = list(_ROOTS)
    if os.geteuid() != 0:
        base = os.path.expanduser(os.environ.get("XDG_DATA_HOME") or "~/.local/share")
        places = [os.path.join(base, place) for place in _ROOTS_OF_A_USER]
    return [place for place in places if os.path.isdir(place)]
