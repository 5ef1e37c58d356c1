# SPDX-License-Identifier: Apache-2.0
"""The manifest of a bundle is in proportion to the bundle."""

from __future__ import annotations

from pathlib import Path

import pytest

from buildidfs.errors import IntegrityError
from buildidfs.formats import bundle_archive
from buildidfs.store.blobs.zstd import FrameWriter
from buildidfs.store.bundle import BundleFile


def test_manifest_that_grows_a_thousandfold_is_refused_before_it_is_read(tmp_path: Path) -> None:
    absent = b'{"build_id":"abcd","why":""}'
    found = {}
    for count in (10_000, 500_000):
        listed = b",".join([absent] * count)
        text = b'{"bundle":1,"host":"","inputs":[],"items":[],"absent":[%s]}' % listed
        with (tmp_path / "made").open("wb") as stream:
            writer = FrameWriter(stream.fileno())
            writer.write(bundle_archive.header(bundle_archive.MANIFEST, len(text)) + text)
            writer.finish()
        try:
            with BundleFile(tmp_path / "made") as bundle:
                found[count] = f"{len(bundle.manifest.absent)} absent"
        except IntegrityError as error:
            found[count] = str(error)
    assert found[10_000] == "10000 absent"
    assert found[500_000].endswith("the manifest of the bundle is larger than any that is written")


@pytest.mark.parametrize(("packed", "accepted"), [(0, 1 << 20), (1 << 20, 17 << 20)])
def test_size_of_a_manifest_is_bounded_by_that_of_the_bundle(packed: int, accepted: int) -> None:
    header = bundle_archive.header(bundle_archive.MANIFEST, accepted)
    assert bundle_archive.manifest_size(header, packed) == accepted
    header = bundle_archive.header(bundle_archive.MANIFEST, accepted + 1)
    with pytest.raises(IntegrityError):
        bundle_archive.manifest_size(header, packed)


def test_content_that_grows_a_thousandfold_is_refused(tmp_path: Path) -> None:
    text = b'{"bundle":1,"host":"","inputs":[],"items":[],"absent":[]}'
    with (tmp_path / "made").open("wb") as stream:
        writer = FrameWriter(stream.fileno())
        writer.write(bundle_archive.header(bundle_archive.MANIFEST, len(text)) + text)
        for _ in range(160):
            writer.write(bytes(1 << 20))
        writer.finish()
    with pytest.raises(IntegrityError, match="compressed"):
        BundleFile(tmp_path / "made")
    bundle_archive.check_content(128 << 20, 0)
    bundle_archive.check_content(384 << 20, 1 << 20)
