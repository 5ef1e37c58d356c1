# SPDX-License-Identifier: Apache-2.0
"""A Ceph cluster on this machine: one monitor, object stores in memory, and S3 gateways.

Without authentication between its parts, and without a manager, which buckets do not need.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import subprocess
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

from tests.support.clients.tools import tool
from tests.support.harness.waiting import until
from tests.support.servers.serving import free_port

KEY, SECRET = "key-of-ceph", "secret-of-ceph"

_CONFIGURATION = """\
[global]
fsid = {fsid}
mon_initial_members = a
mon_host = [v2:127.0.0.1:{port}/0]
public_network = 127.0.0.0/8
ms_bind_ipv6 = false
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
osd_pool_default_size = 2
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 8
osd_pool_default_pgp_num = 8
osd_pool_default_pg_autoscale_mode = off
osd_crush_chooseleaf_type = 0
mon_max_pg_per_osd = 1000
mon_data_avail_crit = 1
mon_data_avail_warn = 1
osd_objectstore = bluestore
bluestore_block_size = 2147483648
osd_memory_target = 1073741824
osd_class_dir = {classes}
osd_class_load_list = *
osd_class_default_list = *
osd_heartbeat_grace = 5
osd_heartbeat_interval = 2
run_dir = {directory}/run
log_file = {directory}/log/$name.log
admin_socket = {directory}/run/$name.asok
pid_file = {directory}/run/$name.pid
[mon.a]
mon_data = {directory}/mon
[osd]
osd_data = {directory}/osd/$id
"""
_GATEWAY = """\
[client.{name}]
rgw_frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
ms_mon_client_mode = crc
rgw_data = {directory}/rgw
"""


class Ceph:
    """A running cluster. ``urls`` are its gateways."""

    def __init__(self, directory: Path, osds: int, gateways: int) -> None:
        self._directory = directory
        self._configuration = directory / "ceph.conf"
        ports = {f"rgw{number}": free_port() for number in range(gateways)}
        self.urls = [f"http://127.0.0.1:{port}" for port in ports.values()]
        monitor, fsid = free_port(), str(uuid.uuid4())
        for name in ("run", "log", "mon", "rgw", "osd"):
            (directory / name).mkdir(parents=True)
        # Ceph 18 of Debian 13 looks for them in a directory relative to the current one.
        (classes,) = Path("/usr/lib").glob("*/rados-classes")
        text = _CONFIGURATION.format(directory=directory, port=monitor, fsid=fsid, classes=classes)
        for name, port in ports.items():
            text += _GATEWAY.format(name=name, port=port, directory=directory)
        self._configuration.write_text(text)
        address = f"[v2:127.0.0.1:{monitor}]"
        names = ("monmaptool", "--create", "--fsid", fsid, "--addv", "a", address)
        self._run(*names, str(directory / "monmap"))
        self._ceph("ceph-mon", "--mkfs", "-i", "a", "--monmap", str(directory / "monmap"))
        self._ceph("ceph-mon", "-i", "a")
        for number in range(osds):
            name = str(uuid.uuid4())
            (directory / "osd" / str(number)).mkdir()
            self._ceph("ceph", "osd", "new", name)
            self._ceph("ceph-osd", "-i", str(number), "--mkfs", "--osd-uuid", name)
            self.start_osd(number)
        for number in range(gateways):
            self.start_gateway(number)
        user = ("user", "create", "--uid=test", "--display-name=test")
        self._ceph("radosgw-admin", *user, f"--access-key={KEY}", f"--secret-key={SECRET}")

    def environ(self, gateway: int = 0) -> dict[str, str]:
        """The environment of a client of a gateway."""
        return {
            "AWS_ENDPOINT_URL": self.urls[gateway],
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "default",
        }

    def create_bucket(self, name: str) -> None:
        """Make a bucket."""
        import obstore
        from obstore.store import S3Store

        store = S3Store(
            name,
            endpoint=self.urls[0],
            access_key_id=KEY,
            secret_access_key=SECRET,
            region="us-east-1",
            client_options={"allow_http": True},
        )
        url = obstore.sign(store, "PUT", "", datetime.timedelta(seconds=60))
        with urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=60):
            pass

    def start_osd(self, number: int) -> None:
        """Start an object store."""
        self._ceph("ceph-osd", "-i", str(number))

    def start_gateway(self, number: int) -> None:
        """Start a gateway, and wait for its answer."""
        self._ceph("radosgw", "-n", f"client.rgw{number}")
        until(lambda: self._answers(number), "an answer of the gateway", 60)

    def kill(self, name: str) -> None:
        """Kill a part: ``osd.0``, ``client.rgw1``."""
        pid = int((self._directory / "run" / f"{name}.pid").read_text())
        os.kill(pid, signal.SIGKILL)
        until(lambda: not Path(f"/proc/{pid}/cmdline").exists() or _is_dead(pid), "its end")

    def stop(self) -> None:
        """Kill all parts."""
        for file in (self._directory / "run").glob("*.pid"):
            with contextlib.suppress(OSError, ValueError):
                pid = int(file.read_text())
                if str(self._configuration).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)

    def _answers(self, number: int) -> bool:
        try:
            with urllib.request.urlopen(self.urls[number], timeout=5):
                return True
        except (OSError, urllib.error.URLError):
            return False

    def _ceph(self, program: str, *words: str) -> None:
        self._run(program, "-c", str(self._configuration), *words)

    def _run(self, program: str, *words: str) -> None:
        done = subprocess.run([tool(program), *words], capture_output=True, timeout=120)
        assert done.returncode == 0, (program, words, done.stderr.decode(errors="replace"))


def _is_dead(pid: int) -> bool:
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True


@contextlib.contextmanager
def ceph(directory: Path, osds: int = 3, gateways: int = 2) -> Iterator[Ceph]:
    """Run a cluster while the block runs."""
    cluster = Ceph.__new__(Ceph)
    try:
        cluster.__init__(directory, osds, gateways)  # type: ignore[misc]
        yield cluster
    finally:
        cluster.stop()
