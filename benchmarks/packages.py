# SPDX-License-Identifier: Apache-2.0
"""Capturing from packages, against debuginfod indexing the same ones.

The packages are those of this Debian release, downloaded once; half of them are made into rpm
packages, with the compression that is in use there at a level that does not take all day.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Final

from benchmarks.bench import Bench, Benchmark, Unusable, require, run, timed
from benchmarks.mounts import buildidfs
from benchmarks.report import Row
from benchmarks.scanning import debuginfod

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_DEBS: Final = (
    "bash", "binutils-x86-64-linux-gnu", "busybox", "cmake", "coreutils", "cpp-12", "curl",
    "g++-12", "gcc-12", "gdb", "git", "gzip", "libc6", "libc6-dbg", "libcurl4", "libgcc-s1",
    "libglib2.0-0", "libicu72", "libnode108", "libperl5.36", "libpython3.11",
    "libpython3.11-stdlib", "libruby3.1", "libsqlite3-0", "libssl3", "libstdc++6", "libxml2",
    "mariadb-server-core", "nginx", "openssh-client", "openssh-server", "openssl", "perl",
    "perl-base", "postgresql-15", "postgresql-client-15", "python3.11-minimal", "redis-server",
    "rsync", "ruby3.1", "sqlite3", "strace", "systemd", "tar", "udev", "util-linux", "valgrind",
    "vim", "xz-utils", "zstd",
)  # fmt: skip
_RPMS: Final = (
    "apache2-bin", "avahi-daemon", "bind9-libs", "cups-daemon", "dnsmasq-base", "dovecot-core",
    "e2fsprogs", "emacs-bin-common", "ethtool", "exim4-daemon-light", "ffmpeg", "file", "gawk",
    "gdisk", "gpg", "gpg-agent", "graphviz", "haproxy", "htop", "iproute2", "iptables",
    "krb5-kdc", "ldap-utils", "lvm2", "lynx", "make", "memcached", "mutt", "nano", "nfs-common",
    "nmap", "ntfs-3g", "openvpn", "poppler-utils", "procps", "qemu-utils", "rsyslog", "screen",
    "smartmontools", "socat", "squid", "subversion", "sudo", "tcpdump", "tmux", "traceroute",
    "unbound", "wget", "winbind", "zsh",
)  # fmt: skip
_SPEC: Final = """\
Name: {name}
Version: 1
Release: 1
Summary: for a benchmark
License: none
AutoReqProv: no
%global __os_install_post %{{nil}}
%global debug_package %{{nil}}
%define _build_id_links none
%description
for a benchmark
%install
mkdir -p %{{buildroot}}
cp -a {tree}/. %{{buildroot}}/
%files -f {listing}
"""


def packages(bench: Bench) -> Iterator[Row]:
    """Rows for scanning 50 Debian and 50 rpm packages, on every CPU there is."""
    require("debuginfod", "debuginfod")
    require("rpmbuild", "rpm")
    count = bench.size(len(_DEBS), 10)
    places = [_downloaded(bench, "debs", _DEBS[:count]), _converted(bench, _RPMS[:count])]
    number = sum(len(list(place.iterdir())) for place in places)
    theirs: list[float] = []
    ours: list[float] = []
    found: set[bytes] = set()
    captured: set[bytes] = set()
    cpus = str(os.cpu_count() or 1)
    for turn in range(bench.size(3, 1)):
        bench.say(f"packages: round {turn + 1}")
        theirs.append(
            debuginfod(
                bench, "-F", "-R", "-U", "-c", cpus, *places,
                look=lambda index: found.update(_indexed(index)),
            )
        )  # fmt: skip
        with bench.scratch("packages-store") as directory:
            os.sync()
            store = directory / "store"
            command = buildidfs(store, "scan", "package", *places)
            ours.append(timed(partial(run, command)))
            captured.update(line.split()[0] for line in run(buildidfs(store, "list")).splitlines())
    yield Row(
        f"scan package, {number} .deb and .rpm, speed against debuginfod -F -R -U -c {cpus}",
        ">=", 1, min(theirs) / min(ours),
        detail=f"{min(ours):.2f} s, debuginfod {min(theirs):.2f} s",
    )  # fmt: skip
    yield Row(
        "build IDs in these packages that debuginfod finds and scan package does not", "<=", 0,
        len(found - captured),
        detail=f"{len(found)} there, {len(captured)} here",
    )  # fmt: skip


def _indexed(index: Path) -> set[bytes]:
    """The build IDs of archives in debuginfod's index, as hex."""
    with sqlite3.connect(f"file:{index}?mode=ro", uri=True) as database:
        tables = database.execute(
            "SELECT name FROM sqlite_master WHERE name LIKE '%\\_r\\_de' ESCAPE '\\'"
        )
        ((table,),) = tables.fetchall()
        prefix = table.removesuffix("_r_de")
        rows = database.execute(
            f"SELECT DISTINCT b.hex FROM {prefix}_buildids b, {table} r WHERE r.buildid = b.id"
        )
        return {hexadecimal.encode() for (hexadecimal,) in rows}


def _downloaded(bench: Bench, name: str, wanted: Sequence[str]) -> Path:
    """A directory with these packages, as far as the release has them; kept for later runs."""
    require("apt-get", "apt")
    place = bench.cache / f"{name}-{len(wanted)}"
    if place.exists():
        return place
    bench.say(f"downloading {len(wanted)} packages, once")
    work = bench.cache / f"{name}.part"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    for package in wanted:
        run(["apt-get", "download", "-q", package], cwd=work, ok=(0, 100))
    got = len(list(work.iterdir()))
    if got < len(wanted) // 2:
        raise Unusable(f"apt-get downloads {got} of {len(wanted)} packages: no network, or lists?")
    work.rename(place)
    return place


def _converted(bench: Bench, wanted: Sequence[str]) -> Path:
    """A directory with rpm packages that have the files of Debian's; kept for later runs."""
    place = bench.cache / f"rpms-{len(wanted)}"
    if place.exists():
        return place
    debs = _downloaded(bench, "for-rpms", wanted)
    bench.say(f"making {len(wanted)} rpm packages, once")
    work = bench.cache / "rpms.part"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    with bench.scratch("rpms") as scratch, ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda deb: _convert(deb, work, scratch / deb.name), debs.iterdir()))
    work.rename(place)
    return place


def _convert(deb: Path, out: Path, scratch: Path) -> None:
    tree, listing, spec = scratch / "tree", scratch / "files", scratch / "x.spec"
    tree.mkdir(parents=True)
    run(["dpkg-deb", "-x", deb, tree])
    entries = [path for path in tree.rglob("*") if path != tree]
    listing.write_bytes(
        b"\n".join(
            (b"%dir " if path.is_dir() and not path.is_symlink() else b"")
            + b'"/' + os.fsencode(path.relative_to(tree)) + b'"'
            for path in entries
        )
    )  # fmt: skip
    name = deb.name.partition("_")[0]
    spec.write_text(_SPEC.format(name=name, tree=tree, listing=listing))
    defined = {
        "_topdir": scratch / "top", "_rpmdir": out, "_rpmfilename": f"{name}.rpm",
        "_binary_payload": "w3.zstdio", "buildroot": scratch / "root",
    }  # fmt: skip
    options = [word for key, value in defined.items() for word in ("--define", f"{key} {value}")]
    run(["rpmbuild", "-bb", "--quiet", *options, spec])
    shutil.rmtree(scratch)


ROWS: dict[str, Benchmark] = {"packages": packages}
