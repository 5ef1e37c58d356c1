# SPDX-License-Identifier: Apache-2.0
"""The decoders of packages and images: archives, their headers, and what names them."""

from __future__ import annotations

import io
import json
import struct
import tarfile
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final

from buildidfs.formats.archive import common, packages, tar
from buildidfs.formats.archive.common import Damaged, Member
from buildidfs.formats.container import engine_records, oci
from buildidfs.formats.container.oci import LayerNames
from tests.fuzz.target import MEGABYTE, Target, filled, refusal
from tests.support.filesystems.sources import Bytes, ar_member, deb, entry
from tests.support.filesystems.sources import tar as tarred

if TYPE_CHECKING:
    from buildidfs.model import ContainerNames

# --- archives ------------------------------------------------------------------------------------


def _walk(members: Iterable[Member], source: Bytes, size: int) -> None:
    """Take a little of each member, as a scan does."""
    for member in members:
        assert member.stored >= 0
        assert member.size >= 0
        assert -(2**63) < member.mtime_ns < 2**63
        assert 0 <= member.uid < 2**32
        assert 0 <= member.gid < 2**32
        assert len(member.name) <= common.NAME_MAX_BYTES
        path = common.installed(member.name)
        assert path.startswith(b"/")
        assert not {b"..", b".", b""} & set(path[1:].split(b"/") if len(path) > 1 else ())
        common.installed(member.target)
        packages.is_metadata(member.name)
        if member.extents is not None:
            assert sum(length for _, length in member.extents) == member.stored
        before = source.position
        source.take(min(4, member.stored))
        assert before <= source.position <= size


def _scan_tar(data: bytes) -> None:
    tar.is_header(data[: tar.BLOCK])
    common.packing(data[: common.PACKING_HEAD])
    for concatenated in (False, True):
        source = Bytes(data)
        found = tar.members(source, concatenated=concatenated)
        refusal(lambda: _walk(found, source, len(data)), Damaged)  # noqa: B023 - called at once


def _scanned_seed_tar() -> Iterator[bytes]:
    sparse = entry("sparse")
    sparse.pax_headers = {"GNU.sparse.map": "0,3,9,2", "GNU.sparse.size": "20", "mtime": "1.5"}
    listed = entry("listed")
    listed.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.realsize": "20"}
    members = [
        ("./usr/bin/app", b"\x7fELF" * 200),
        (entry("link", tarfile.LNKTYPE, "usr/bin/app"), b""),
        (entry("directory", tarfile.DIRTYPE, mode=0o700, uid=5_000_000), b""),
        ("n" * 300, b"x"),
        (sparse, b"abcde"),
        (listed, b"2\n0\n3\n9\n2\n".ljust(512) + b"abcde"),
    ]
    for format_ in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        yield tarred(members, format_=format_)
    old = bytearray(tarred([("old", b"abc")]))
    old[156:157], old[386:410], old[482] = b"S", b"00000000000\x0000000000003\0", 1
    yield bytes(old[:512]) + bytes(512) + bytes(old[512:])


def _scanned_huge_tar() -> Iterator[bytes]:
    empty = tarred([("a", b"")], end=False)
    yield filled(empty)
    yield bytes(MEGABYTE)
    info = entry("x")
    for records in ({"a": ""}, {"path": "p" * 4000}, {"mtime": "9" * 19}):
        info.pax_headers = records
        yield filled(tarred([(info, b"")], format_=tarfile.PAX_FORMAT, end=False))
    info.pax_headers = {f"{number}": "" for number in range(60_000)}
    yield tarred([(info, b"")], format_=tarfile.PAX_FORMAT)[:MEGABYTE]
    info.pax_headers = {"GNU.sparse.map": "0,0," * 200_000 + "0,0", "GNU.sparse.size": "1"}
    yield tarred([(info, b"")], format_=tarfile.PAX_FORMAT)[:MEGABYTE]
    info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.realsize": "1"}
    for digits in (b"65536\n" + b"0\n" * 400_000, b"65536\n" + b"\n" * 900_000, b"9" * 900_000):
        yield tarred([(info, digits)], format_=tarfile.PAX_FORMAT)[:MEGABYTE]
    yield tarred([("n" * 900_000, b"")])


def _check_ar(data: bytes) -> None:
    source = Bytes(data)

    def attempt() -> None:
        for member in packages.ar_members(source):
            assert member.size >= 0
            assert len(member.name) <= 16

    refusal(attempt, Damaged)


def _huge_ar() -> Iterator[bytes]:
    yield packages.AR_MAGIC + filled(ar_member(b"a", b""))


def _scan_cpio(data: bytes) -> None:
    listed = [Member(b"/a", common.Type.FILE, 3, 3), Member(b"/b", common.Type.FILE, 5, 5)]
    source = Bytes(data)
    refusal(
        lambda: _walk(packages.cpio_members(source, lambda: listed), source, len(data)), Damaged
    )


def _newc(name: bytes, data: bytes = b"", links: int = 1) -> bytes:
    fields = (1, 0o100755, 5, 6, links, 7, len(data), 8, 1, 0, 0, len(name) + 1, 0)
    text = b"070701" + b"".join(b"%08x" % field for field in fields) + name + b"\0"
    return text + bytes(-len(text) % 4) + data + bytes(-len(data) % 4)


def _scanned_seed_cpio() -> Iterator[bytes]:
    yield _newc(b"./usr/app", b"12345") + _newc(b"a", links=2) + _newc(b"TRAILER!!!")
    yield b"07070X00000001\0\0" + b"12345\0\0\0" + b"07070X00000000\0\0" + b"abc\0" + _newc(b"x")


def _scanned_huge_cpio() -> Iterator[bytes]:
    yield filled(_newc(b"a"))
    yield filled(_newc(b"n" * 4095))
    yield filled(b"07070X00000000\0\0abc\0")


# --- headers of rpm packages ---------------------------------------------------------------------


def _check_rpm(data: bytes) -> None:
    def attempt() -> None:
        header = packages.rpm_header(Bytes(data))
        assert packages.PackageName(*header.name).text.isprintable()
        assert all(0 < len(each) <= 1024 for each in header.signatures().values())
        files = header.files()
        assert len(files) <= len(data)
        for number in range(len(files)):
            assert files[number].stored <= files[number].size

    refusal(attempt, Damaged)


_TAGS: Final = (
    274,
    1000,
    1001,
    1002,
    1003,
    1022,
    1028,
    1030,
    1034,
    1095,
    1096,
    5008,
    1116,
    1117,
    1118,
)


def _rpm(entries: Iterable[tuple[int, int, int, int]], data: bytes) -> bytes:
    index = b"".join(struct.pack(">IIII", *each) for each in entries)
    header = struct.pack(">4s4xII", b"\x8e\xad\xe8\x01", len(index) // 16, len(data)) + index + data
    # The header of signatures has the same: each decoder looks for its tags only.
    return packages.RPM_MAGIC + bytes(92) + header + bytes(-len(header) % 8) + header


def _listing(count: int, directory: bytes) -> bytes:
    """As many files as asked for, all of them in the same directory."""
    data, entries = directory + b"\0", [(1118, 8, 0, 1)]
    for tag, kind, raw in (
        (1117, 8, b"n\0"), (1116, 4, bytes(4)), (1028, 4, bytes(4)), (1030, 3, b"\x81\xed"),
        (274, 8, b"0302\0"),
    ):  # fmt: skip
        entries.append((tag, kind, len(data), count))
        data += raw * count
    return _rpm(entries, data)


def _seed_rpm() -> Iterator[bytes]:
    yield _listing(3, b"/usr/bin/")
    yield _rpm([(1000, 6, 0, 1), (1001, 6, 4, 1), (1003, 4, 8, 1)], b"app\01.2\0\0\0\0\2")


def _huge_rpm() -> Iterator[bytes]:
    yield _listing(30_000, b"/")
    yield _listing(20_000, b"/" + b"d" * 150_000)
    yield _rpm([(1000, 6, 0, 1)] * 30_000, b"")
    every = [(tag, kind, 0, count) for tag in _TAGS for kind in (3, 8) for count in (1, 1 << 31)]
    yield _rpm(every, bytes(500_000))
    yield _rpm([(tag, 8, 0, 262_144) for tag in _TAGS], bytes(500_000))


# --- names ---------------------------------------------------------------------------------------


def _check_packages(data: bytes) -> None:
    for name in (packages.debian(data), packages.pkginfo(data)):
        assert len(name.text) <= 400
        assert name.text.isprintable()
    packages.is_metadata(data)


def _seed_packages() -> Iterator[bytes]:
    yield b"Package: app\nVersion: 1:2-3\nArchitecture: amd64\nDescription: x\n more\n"
    yield b"# comment\npkgname = app\npkgver = 1-r0\narch = x86_64\n"


def _huge_packages() -> Iterator[bytes]:
    yield b"Package: " + b"\xff" * (MEGABYTE - 32)
    yield filled(b"a:\n")
    yield filled(b"a=%d\n")
    yield b"\n" * MEGABYTE


# --- images --------------------------------------------------------------------------------------


def _check_oci(data: bytes) -> None:
    def documents() -> None:
        found = oci.document(data)
        assert found.is_image or not found.is_image
        for each in (*(found.manifests or ()), *(found.layers or ())):
            assert oci.checked_digest(each.digest) == each.digest
            assert oci.hasher(each.digest).digest_size * 2 == len(each.digest.partition(":")[2])
            assert oci.shown_name(each.name).isprintable()
            assert str(each.platform).isprintable()
            assert each.is_layer or not each.is_attestation or each.annotations

    refusal(documents, Damaged)
    refusal(lambda: oci.chain_ids(oci.config(data).diff_ids), Damaged)
    refusal(lambda: oci.saved(data), Damaged)
    text = data.decode("utf-8", "replace")
    oci.is_meant(text, ("docker.io/library/alpine:3", text), ("sha256:" + "ab" * 32, text))
    oci.parsed_platform(text)
    assert len(oci.shown_name(text)) <= 255


def _seed_oci() -> Iterator[bytes]:
    blob = {"digest": "sha256:" + "ab" * 32, "size": 7, "mediaType": "x.tar"}
    named = {"org.opencontainers.image.ref.name": "app", "vnd.docker.reference.type": "x"}
    platform = {"os": "linux", "architecture": "arm", "variant": "v7"}
    for document in (
        {"schemaVersion": 2, "config": blob, "layers": [blob, blob]},
        {"manifests": [{**blob, "platform": platform, "annotations": named}]},
        {"os": "linux", "rootfs": {"type": "layers", "diff_ids": [blob["digest"]] * 2}},
        [{"Config": "c.json", "RepoTags": ["app:1"], "Layers": ["a/layer.tar"]}],
    ):
        yield json.dumps(document).encode()
    yield b"registry.example.org:5000/team/app:1.2@sha256:" + b"ab" * 32


def _huge_oci() -> Iterator[bytes]:
    yield b"[" * MEGABYTE
    yield b'{"layers":' * (MEGABYTE // 10)
    blob = b'{"digest":"sha256:%s","size":1},' % (b"ab" * 32)
    yield b'{"layers":[' + filled(blob, MEGABYTE - 256) + blob[:-1] + b"]}"
    ids = b'"sha256:%s",' % (b"ab" * 32)
    yield b'{"rootfs":{"diff_ids":[' + filled(ids, MEGABYTE - 256) + ids[:-1] + b"]}}"
    yield (
        b'{"manifests":['
        + blob[:-2]
        + b',"annotations":{'
        + filled(b'"a":"b",', 900_000)
        + b'"":""}}]}'
    )
    yield filled(b"a/")
    yield filled(b"@")


def _check_whiteouts(data: bytes) -> None:
    names = LayerNames(1 << 20)

    def attempt() -> None:
        for number, line in enumerate(data.split(b"\n")):
            path = common.installed(line)
            if names.note(path, number % 2 == 0):
                assert number % 2 == 0 or names.hides(path)
                assert names.hides(path + b"/below") or number % 2 == 0
            names.hides(path)

    refusal(attempt, Damaged)


def _huge_whiteouts() -> Iterator[bytes]:
    yield b"/a" * (MEGABYTE // 2)
    yield filled(b"a/.wh.b\n")
    yield filled(b"/a" * 2000 + b"\n")
    yield b"\n".join(b"%d/.wh..wh..opq" % number for number in range(40_000))


def _check_engines(data: bytes) -> None:
    for kind in (
        engine_records.Repositories, engine_records.DockerSettings,
        list[engine_records.StoredImage],
    ):  # fmt: skip
        refusal(lambda kind=kind: engine_records.decoded(data, kind), Damaged)  # type: ignore[misc]  # lambda
    refusal(lambda: engine_records.storage_settings(data), Damaged)

    def images() -> None:
        _check_image(engine_records.decoded(data, engine_records.DockerContainer).run_image)
        _check_image(engine_records.decoded(data, engine_records.RuntimeConfig).run_image)
        _check_names(engine_records.decoded(data, engine_records.DockerContainer).called)
        _check_names(engine_records.decoded(data, engine_records.RuntimeConfig).called)

    def listed() -> None:
        for container in engine_records.decoded(data, list[engine_records.StoredContainer]):
            _check_image(container.run_image)
            _check_names(container.called)

    refusal(images, Damaged)
    refusal(listed, Damaged)

    def layers() -> None:
        found = {
            layer.id: layer
            for layer in engine_records.decoded(data, list[engine_records.StoredLayer])
        }
        for name in (*list(found)[:3], *list(found)[-3:]):
            assert len(engine_records.stack(name, found)) <= len(found)

    refusal(layers, Damaged)
    text = data.decode("utf-8", "replace")
    if refusal(lambda: engine_records.component(text), Damaged) is None:
        assert "/" not in text
        assert text not in (".", "..", "")


def _check_names(names: ContainerNames) -> None:
    for text in (names.name, names.pod, names.namespace):
        assert text.isprintable()
        assert len(text) <= 255


def _check_image(image: engine_records.RunImage) -> None:
    lines = str(image).split("\n")
    assert len(lines) <= 2
    assert all(line.isprintable() and line.isascii() for line in lines)
    assert image.digest in ("", lines[-1])
    assert len(str(image)) <= 255 + 1 + 71


def _seed_engines() -> Iterator[bytes]:
    yield json.dumps({"Repositories": {"a": {"a:1": "sha256:" + "ab" * 32}}}).encode()
    yield json.dumps([{"id": "1", "parent": "2", "diff-digest": "x"}, {"id": "2"}]).encode()
    yield json.dumps([{"id": "1", "names": ["a"], "layer": "2", "metadata": "{}"}]).encode()
    said = json.dumps({"image-name": "a:1", "image-id": "ab" * 32})
    yield json.dumps([{"id": "1", "image": "cd" * 32, "metadata": said}]).encode()
    yield json.dumps({"Config": {"Image": "a:1"}, "Image": "sha256:" + "ab" * 32}).encode()
    yield json.dumps({"annotations": {"io.kubernetes.cri.image-name": "a:1"}}).encode()
    yield b'{"data-root": "/srv/docker"}'
    yield b'[storage]\ndriver = "overlay"\ngraphroot = "/srv"\n'
    yield b"0123abc-init"


def _huge_engines() -> Iterator[bytes]:
    yield b"[" * MEGABYTE
    chain = (b'{"id":"%d","parent":"%d"}' % (number, number + 1) for number in range(30_000))
    yield b"[" + b",".join(chain) + b"]"
    yield b'{"Repositories":{"a":{' + filled(b'"a":"b",', MEGABYTE - 64) + b'"":""}}}'
    yield b"a" * MEGABYTE
    yield b"[storage]\n" + filled(b"a.b.c.d={e.f=1}\n", engine_records.SETTINGS_MAX - 64)
    yield b"a=" + filled(b"[", engine_records.SETTINGS_MAX - 64)
    said = json.dumps({"image-name": "a" * 500_000})
    yield json.dumps([{"id": "1", "metadata": said}]).encode()


class Forward:
    """A `common.ByteStream` of bytes in memory, which goes forward and nowhere else."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.budget = common.budget_of(len(data))
        self.position = 0

    def take(self, size: int) -> bytes:
        """The next bytes."""
        assert size >= 0
        found = self._data[self.position : self.position + size]
        self.position += len(found)
        return found

    def skip(self, size: int) -> None:
        """Pass over some."""
        assert size >= 0, "back to where it was"
        if self.position + size > len(self._data):
            raise common.Damaged("ends too early")
        self.position += size


def _claims(members: Iterable[common.Member], data: bytes) -> None:
    """Claims of members are never negative, and there are no more members than room."""
    for count, member in enumerate(members):
        assert count <= len(data) // 8
        assert member.size >= 0
        assert member.stored >= 0
        assert max(len(member.name), len(member.target)) <= common.NAME_MAX_BYTES
        assert member.mode & ~0o7777 == 0
        assert 0 <= member.uid < 1 << 32
        assert 0 <= member.gid < 1 << 32
        assert -(1 << 63) < member.mtime_ns < 1 << 63
        inside = common.installed(member.name)
        assert inside.startswith(b"/")
        assert not {b"..", b".", b""} & {*inside[1:].split(b"/")} or inside == b"/"
        for offset, length in member.extents or ():
            assert 0 <= offset <= offset + length <= member.size


def _check(
    decode: Callable[[Forward], Iterable[common.Member]],
) -> Callable[[bytes], None]:
    def check(data: bytes) -> None:
        error = refusal(lambda: _claims(decode(Forward(data)), data), common.Damaged)
        assert error is None or str(error)

    return check


# --- cpio and tar that lie -----------------------------------------------------------------------


def _cpio_member(name: bytes, content: bytes, **changes: bytes) -> bytes:
    fields = {
        "ino": b"00000001", "mode": b"000081a4", "uid": b"00000000", "gid": b"00000000",
        "links": b"00000001", "mtime": b"00000007", "size": b"%08x" % len(content),
        "major": b"00000008", "minor": b"00000001", "rmajor": b"00000000", "rminor": b"00000000",
        "name": b"%08x" % (len(name) + 1), "check": b"00000000",
    }  # fmt: skip
    head = b"070701" + b"".join({**fields, **changes}.values()) + name + b"\0"
    head += bytes(-len(head) % 4)
    return head + content + bytes(-len(content) % 4)


_CPIO_END: Final = _cpio_member(b"TRAILER!!!", b"")


def _seed_cpio() -> Iterator[bytes]:
    linked = _cpio_member(b"./usr/bin/y", b"", links=b"00000002")
    yield _cpio_member(b"./usr/bin/x", b"content") + linked + _CPIO_END
    yield b"07070X00000000" + bytes(2) + b"content\0" + b"07070X00000001" + bytes(2) + _CPIO_END
    for size in (b"-0000010", b" +000010", b"ffffffff", b"0x000010", b"000_0010"):
        yield _cpio_member(b"x", bytes(16), size=size) + _CPIO_END
    yield b"07070X-0000001" + bytes(2) + _CPIO_END


def _huge_cpio() -> Iterator[bytes]:
    yield filled(_cpio_member(b"x", b""))
    yield filled(_cpio_member(b"x" * 4000, b""))
    yield filled(b"07070X00000000" + bytes(2))


_LISTED: Final = [
    common.Member(b"/usr/bin/x", common.Type.FILE, 7, 7),
    common.Member(b"/usr/bin/y", common.Type.DIRECTORY),
]


def _tar(form: int, members: Iterable[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=form) as archive:
        for member, content in members:
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return packed.getvalue().rstrip(b"\0") + bytes(1024)


def _summed(header: bytearray) -> bytes:
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def _seed_tar() -> Iterator[bytes]:
    for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        member = tarfile.TarInfo("./usr/bin/x")
        yield _tar(form, [(member, b"content")])
        if form != tarfile.USTAR_FORMAT:
            yield _tar(form, [(tarfile.TarInfo("d/" * 200 + "x"), b"content")])
    sparse = tarfile.TarInfo("sparse")
    sparse.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0",
                          "GNU.sparse.name": "x", "GNU.sparse.realsize": "5000"}  # fmt: skip
    yield _tar(tarfile.PAX_FORMAT, [(sparse, b"1\n4096\n7\n".ljust(512, b"\0") + b"content")])
    mapped = tarfile.TarInfo("mapped")
    mapped.pax_headers = {"GNU.sparse.map": "0,3,9,4", "GNU.sparse.size": "20"}
    yield _tar(tarfile.PAX_FORMAT, [(mapped, b"content")])
    old = bytearray(tarfile.TarInfo("old").tobuf(tarfile.GNU_FORMAT))
    old[124:136], old[156:157] = b"00000000007\0", b"S"
    old[386:410], old[483:495] = b"00000000000\x0000000000007\0", b"00000010000\0"
    yield _summed(old) + b"content".ljust(512, b"\0") + bytes(1024)


def _check_tar(data: bytes) -> None:
    """As it is, and with the checksums right that damage has made wrong."""
    check = _check(lambda source: tar.members(source, concatenated=True))
    check(data)
    whole = b"".join(
        _summed(bytearray(block)) if block[257:262] == b"ustar" and len(block) == 512 else block
        for block in (data[at : at + 512] for at in range(0, len(data), 512))
    )
    if whole != data:
        check(whole)


def _huge_tar() -> Iterator[bytes]:
    header = bytearray(tarfile.TarInfo("x").tobuf(tarfile.GNU_FORMAT))
    yield filled(bytes(header))
    yield bytes(MEGABYTE)
    for kind in (b"x", b"L", b"K", b"g"):
        header[156:157] = kind
        yield filled(_summed(header))
        header[124:136] = b"%011o\0" % (MEGABYTE - 1024)
        for body in (b"6 a=b\n", b"9", b" ", b"24 GNU.sparse.offset=11\n", b"a\0"):
            yield _summed(header) + filled(body, MEGABYTE - 1024) + bytes(512)
        header[124:136] = b"00000000000\0"
    header[156:157], header[482:483] = b"S", b"\1"
    blocks = (b"00000000000\x0000000000000\0" * 21 + b"\1").ljust(512, b"\0")
    yield _summed(header) + filled(blocks, MEGABYTE - 512)
    wide = tarfile.TarInfo("x")
    wide.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.realsize": "99999999"}
    for lines in (b"0\n" * 400_000, b"400000\n" + b"0\n" * 400_000, b"9" * 800_000):
        yield _tar(tarfile.PAX_FORMAT, [(wide, lines)])
    many = tarfile.TarInfo("x")
    many.pax_headers = {"GNU.sparse.map": "0,0," * 240_000, "GNU.sparse.size": "9"}
    yield _tar(tarfile.PAX_FORMAT, [(many, b"")])


def _check_both(*checks: Callable[[bytes], None]) -> Callable[[bytes], None]:
    def check(data: bytes) -> None:
        for each in checks:
            each(data)

    return check


TARGETS: Final = {
    "cpio": Target(
        _check_both(
            _check(lambda source: packages.cpio_members(source, lambda: _LISTED)), _scan_cpio
        ),
        lambda: [*_seed_cpio(), *_scanned_seed_cpio()],
        lambda: [*_huge_cpio(), *_scanned_huge_cpio()],
        ("archive.packages",),
        cost=_check(lambda source: packages.cpio_members(source, lambda: _LISTED)),
    ),
    "tar": Target(
        _check_both(_check_tar, _scan_tar),
        lambda: [*_seed_tar(), *_scanned_seed_tar()],
        lambda: [*_huge_tar(), *_scanned_huge_tar()],
        ("archive.tar", "archive.common"),
        cost=_check(lambda source: tar.members(source, concatenated=True)),
    ),
    "oci": Target(_check_oci, _seed_oci, _huge_oci, ("container.oci",)),
    "whiteouts": Target(
        _check_whiteouts,
        lambda: [b"usr/bin/a\nusr/.wh.b\nusr/.wh..wh..opq\n.wh..wh.plnk/x\nusr"],
        _huge_whiteouts,
        ("container.oci",),
    ),
    "engines": Target(_check_engines, _seed_engines, _huge_engines, ("container.engine_records",)),
    "ar": Target(_check_ar, lambda: [deb(b"data")], _huge_ar, ("archive.packages",)),
    "rpm": Target(_check_rpm, _seed_rpm, _huge_rpm, ("archive.packages",)),
    "packages": Target(_check_packages, _seed_packages, _huge_packages, ("archive.packages",)),
}
