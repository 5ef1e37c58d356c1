# SPDX-License-Identifier: Apache-2.0
"""Cgroup paths, and the names of containers in them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buildidfs.formats.container import cgroup
from buildidfs.formats.container.cgroup import (
    container_id,
    container_label,
    outermost,
    path,
    place,
    unified,
)

ID = b"0123456789abcdef" * 4
OTHER = b"fedcba9876543210" * 4
POD = b"0a1b2c3d-4e5f-6789-abcd-ef0123456789"
POD_UNIT = POD.replace(b"-", b"_")


@pytest.mark.parametrize(
    ("where", "label"),
    [
        (b"/docker/" + ID, "docker:0123456789ab"),
        (b"/system.slice/docker-" + ID + b".scope", "docker:0123456789ab"),
        (b"/machine.slice/libpod-" + ID + b".scope", "podman:0123456789ab"),
        (b"/machine.slice/libpod-" + ID + b".scope/container", "podman:0123456789ab"),
        (
            b"/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-" + ID + b".scope",
            "podman:0123456789ab",
        ),
        (b"/libpod_parent/libpod-" + ID, "podman:0123456789ab"),
        (b"/kubepods/burstable/pod" + POD + b"/" + ID, "k8s:0123456789ab"),
        (
            b"/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod"
            + POD_UNIT
            + b".slice/cri-containerd-"
            + ID
            + b".scope",
            "k8s:0123456789ab",
        ),
        (b"/kubepods.slice/kubepods-pod" + POD_UNIT + b".slice", "k8s:0a1b2c3d4e5f"),
        (b"/system.slice/crio-" + ID + b".scope", "crio:0123456789ab"),
        (b"/system.slice/cri-containerd-" + ID + b".scope", "containerd:0123456789ab"),
        (b"/system.slice/nerdctl-" + ID + b".scope", "containerd:0123456789ab"),
        (b"/default/" + ID, "containerd:0123456789ab"),
        (b"/ecs/task/" + ID, "ecs:0123456789ab"),
        (b"/something/else-" + ID, "container:0123456789ab"),
        (b"/machine.slice/systemd-nspawn@web\\x2d1.service/payload", "nspawn:web-1"),
        (b"/machine.slice/machine-deb.scope", "nspawn:deb"),
        (b"/lxc.payload.alpine/init.scope", "lxc:alpine"),
        (b"/lxc/alpine", "lxc:alpine"),
        # Seen from another cgroup namespace.
        (b"/../../docker-" + ID + b".scope", "docker:0123456789ab"),
        # A container in a container: the inner one.
        (b"/docker/" + OTHER + b"/docker/" + ID, "docker:0123456789ab"),
    ],
)
def test_containers(where: bytes, label: str) -> None:
    assert container_label(where) == label


TASK = b"0123456789abcdef" * 2
# How each runtime names the cgroup of a container, by its cgroup driver.
RUNTIMES = [
    ("docker, cgroupfs", b"/docker/" + ID, "docker"),
    ("docker, systemd", b"/system.slice/docker-" + ID + b".scope", "docker"),
    ("docker, --cgroup-parent", b"/mine.slice/docker-" + ID + b".scope", "docker"),
    ("docker of docker-ce", b"/docker-ce/docker/" + ID, "docker"),
    (
        "docker, rootless",
        b"/user.slice/user-1000.slice/user@1000.service/user.slice/docker-" + ID + b".scope",
        "docker",
    ),
    ("docker, systemd and a systemd in it", b"/docker/" + ID + b"/init.scope", "docker"),
    ("docker, its namespace of containerd", b"/moby/" + ID, "docker"),
    ("podman, cgroupfs", b"/libpod_parent/libpod-" + ID, "podman"),
    ("podman, systemd", b"/machine.slice/libpod-" + ID + b".scope", "podman"),
    ("podman, crun", b"/machine.slice/libpod-" + ID + b".scope/container", "podman"),
    (
        "podman, rootless",
        b"/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-" + ID + b".scope",
        "podman",
    ),
    ("podman, a service with --cgroups=split", b"/system.slice/a.service/libpod-payload-" + ID,
     "podman"),
    (
        "podman, a pod",
        b"/machine.slice/machine-libpod_pod_" + OTHER + b".slice/libpod-" + ID + b".scope",
        "podman",
    ),
    ("podman, a pod itself", b"/machine.slice/machine-libpod_pod_" + ID + b".slice", "podman"),
    (
        "podman, a pod itself, rootless",
        b"/user.slice/user-1.slice/user@1.service/user.slice/user-libpod_pod_" + ID + b".slice",
        "podman",
    ),
    ("podman, a pod itself, cgroupfs", b"/libpod_parent/libpod_pod_" + ID, "podman"),
    ("ctr", b"/default/" + ID, "containerd"),
    ("ctr, namespace of Kubernetes", b"/k8s.io/" + ID, "containerd"),
    ("nerdctl, systemd", b"/system.slice/nerdctl-" + ID + b".scope", "containerd"),
    ("CRI of containerd, systemd", b"/system.slice/cri-containerd-" + ID + b".scope", "containerd"),
    ("CRI of containerd, half systemd", b"/system.slice:cri-containerd:" + ID, "containerd"),
    ("CRI-O, systemd", b"/system.slice/crio-" + ID + b".scope", "crio"),
    ("CRI-O, crun", b"/system.slice/crio-" + ID + b".scope/container", "crio"),
    ("k8s, cgroupfs, guaranteed", b"/kubepods/pod" + POD + b"/" + ID, "k8s"),
    ("k8s, cgroupfs, burstable", b"/kubepods/burstable/pod" + POD + b"/" + ID, "k8s"),
    ("k8s, cgroupfs, CRI-O", b"/kubepods/besteffort/pod" + POD + b"/crio-" + ID, "k8s"),
    *(
        (
            f"k8s, systemd, {runtime.decode()}, {qos.decode() or 'guaranteed'}",
            b"/kubepods.slice/"
            + (b"kubepods-" + qos + b".slice/kubepods-" + qos if qos else b"kubepods") + b"-"
            + b"pod" + POD_UNIT + b".slice/" + runtime + b"-" + ID + b".scope",
            "k8s",
        )
        for runtime in (b"docker", b"cri-containerd", b"crio")
        for qos in (b"", b"burstable", b"besteffort")
    ),
    (
        "k8s, containerd that does not know of systemd",
        b"/system.slice/containerd.service/kubepods-burstable-pod" + POD_UNIT
        + b".slice:cri-containerd:" + ID,
        "k8s",
    ),
    ("k8s, a static pod", b"/kubepods/burstable/pod" + TASK + b"/" + ID, "k8s"),
    ("k8s, kind", b"/docker/" + OTHER + b"/kubelet/kubepods/pod" + POD + b"/" + ID, "k8s"),
    (
        "k8s, kind, systemd",
        b"/system.slice/docker-" + OTHER + b".scope/kubelet.slice/kubelet-kubepods.slice/"
        b"kubelet-kubepods-pod" + POD_UNIT + b".slice/cri-containerd-" + ID + b".scope",
        "k8s",
    ),
    ("k8s, seen from another container", b"/../../pod" + POD + b"/" + ID, "k8s"),
    ("ECS, cgroupfs", b"/ecs/" + TASK + b"/" + ID, "ecs"),
    ("ECS, with the cluster's name", b"/ecs/cluster/" + TASK + b"/" + ID, "ecs"),
    (
        "ECS, systemd",
        b"/ecstasks.slice/ecstasks-" + TASK + b".slice/docker-" + ID + b".scope",
        "ecs",
    ),
]  # fmt: skip


def _lines(version: str, where: bytes) -> bytes:
    """The text of /proc/PID/cgroup on a host with that version of control groups."""
    if version == "v2":
        return b"0::" + where + b"\n"
    first = b"12:pids:" + where + b"\n4:cpu,cpuacct:" + where + b"\n3:rdma:/\n"
    if version == "v1":
        return first + b"1:name=systemd:" + where + b"\n"
    return first + b"1:name=systemd:" + where + b"\n0::/system.slice/containerd.service\n"


@pytest.mark.parametrize("version", ["v1", "hybrid", "v2"])
@pytest.mark.parametrize(
    ("where", "manager"), [pytest.param(*rest, id=name) for name, *rest in RUNTIMES]
)
def test_each_runtime_in_each_version(version: str, where: bytes, manager: str) -> None:
    assert path(_lines(version, where)) == where
    assert container_label(where) == f"{manager}:0123456789ab"


@pytest.mark.parametrize(
    ("where", "label"),
    [
        (b"/default/redis", "containerd:redis"),
        (b"/ecs/" + TASK + b"/" + TASK + b"-1234567890", "ecs:0123456789ab-1234567890"),
        (b"/kubepods.slice/kubepods-pod" + TASK + b".slice", "k8s:0123456789ab"),
        (b"/kubepods/burstable/pod" + POD, "k8s:0a1b2c3d4e5f"),
        (b"/machine.slice/systemd-nspawn@deb.service/payload/init.scope", "nspawn:deb"),
        (b"/machine.slice/machine-deb.scope/payload", "nspawn:deb"),
        (b"/machine.slice/machine-lxc\\x2d1234\\x2ddeb.scope", "lxc:deb"),
        (b"/lxc/101/ns/init.scope", "lxc:101"),
        (b"/lxc.payload/deb", "lxc:deb"),
        (b"/lxc.payload.user-1000_deb/system.slice/ssh.service", "lxc:user-1000_deb"),
        (b"/user.slice/user-1000.slice/session-1.scope/lxc/deb", "lxc:deb"),
    ],
)
def test_containers_with_names(where: bytes, label: str) -> None:
    assert container_label(where) == label
    for version in ("v1", "hybrid", "v2"):
        assert path(_lines(version, where)) == where


@pytest.mark.parametrize(
    "where",
    [
        b"",
        b"/",
        b"/init.scope",
        b"/user.slice/user-1000.slice/session-2.scope",
        b"/system.slice/docker.service",
        b"/machine.slice/libpod-conmon-" + ID + b".scope",
        b"/machine.slice/systemd-nspawn@web.service/supervisor",
        b"/machine.slice/machine-qemu\\x2d1\\x2dvm.scope",
        b"/lxc.monitor.alpine",
        b"/lxc.monitor/alpine",
        b"/system.slice/crio-conmon-" + ID + b".scope",
        b"/system.slice/a.service/runtime",
        b"/system.slice/default/redis",
        b"/ecs/" + TASK,
        b"/docker/" + ID + b"0",
        b"/kubepods.slice",
    ],
)
def test_paths_without_a_container(where: bytes) -> None:
    assert container_label(where) is None


def test_the_monitor_of_an_inner_container_belongs_to_the_outer_one() -> None:
    where = b"/docker/" + ID + b"/machine.slice/libpod-conmon-" + OTHER + b".scope"
    assert container_label(where) == "docker:0123456789ab"


def test_a_label_is_fit_for_a_terminal() -> None:
    assert container_label(b"/lxc/\x1b[31m\xff") == "lxc:??31m?"


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (b"0::/user.slice\n", b"/user.slice"),
        (b"0::/gone (deleted)\n", b"/gone"),
        (b"0::/with:colon\n", b"/with:colon"),
        (b"2:cpu,cpuacct:/a/b/c\n1:name=systemd:/a\n", b"/a"),
        (b"3:pids:/a\n2:cpu,cpuacct:/a/b\n", b"/a/b"),
        (b"1:name=systemd:/a/b\n0::/a\n", b"/a"),
        (
            b"4:memory:/docker/"
            + ID
            + b"\n1:name=systemd:/\n0::/system.slice/containerd.service\n",
            b"/docker/" + ID,
        ),
        (b"", b""),
        (b"nonsense\n", b""),
    ],
)
def test_path(text: bytes, where: bytes) -> None:
    assert path(text) == where


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (b"0::/a/b\n", b"/a/b"),
        (b"0::/gone (deleted)\n", b"/gone"),
        (b"1:name=systemd:/x\n0::/a\n", b"/a"),
        (b"12:pids:/0::/x\n0::/\n", b"/"),
        (b"10::/x\n", b""),
        (b"1:name=systemd:/x\n", b""),
        (b"", b""),
    ],
)
def test_unified(text: bytes, where: bytes) -> None:
    assert unified(text) == where


def test_the_kernels_own_text() -> None:
    with open("/proc/self/cgroup", "rb") as file:
        assert path(file.read()).startswith(b"/")


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [b"/", b"docker-", b"kubepods", b"pod", ID, ID[:9], b"-", b":", b"\n", b"lxc", b"\xff"]
        )
    )
)
def test_anything_may_be_a_path(parts: list[bytes]) -> None:
    text = b"".join(parts)
    label = container_label(text)
    assert label is None or label.isprintable()
    path(text)


def test_longer_than_any_path_costs_no_more() -> None:
    """Each of these is a candidate, and what stands before it is looked at."""
    watched = b"/conmon-" + ID
    assert container_label(watched * 50 + b"/docker-" + ID) == "docker:0123456789ab"
    assert container_label(watched * 10_000 + b"/docker-" + ID) is None
    assert path(b"1:x:/\n" * 100_000 + b"0::/docker/" + ID) == b"/"


@pytest.mark.parametrize(
    ("where", "found"),
    [
        (b"/docker/" + ID, b"/docker/" + ID),
        (b"/docker/" + ID + b"/init.scope", b"/docker/" + ID),
        (b"/docker/" + ID + b"/docker/" + OTHER + b"/x", b"/docker/" + ID + b"/docker/" + OTHER),
        (b"/user.slice/user-7.slice/libpod-" + ID + b".scope/container",
         b"/user.slice/user-7.slice/libpod-" + ID),
        (b"/docker/" + ID + b"/libpod-conmon-" + OTHER + b".scope", b"/docker/" + ID),
        (b"/user.slice/user-7.slice/lxc/web", b"/user.slice/user-7.slice"),
        (b"/user.slice/user-7.slicex/lxc/web", b"/"),
        (b"/lxc/user.slice/user-7.slice", b"/"),
        (b"/lxc/web", b"/"),
        (b"/", b"/"),
        (b"", b""),
    ],
)  # fmt: skip
def test_place(where: bytes, found: bytes) -> None:
    assert place(where) == found
    assert container_id(where) in found.decode()


@pytest.mark.parametrize(
    ("where", "found"),
    [
        (b"/docker/" + ID, b"/docker/" + ID),
        (b"/docker/" + ID + b"/docker/" + OTHER + b"/x", b"/docker/" + ID),
        (b"/docker/" + ID + b"/lxc/web", b"/docker/" + ID),
        (b"/lxc/web/docker/" + ID, b"/lxc/web"),
        (b"/machine.slice/machine-web.scope/x", b"/machine.slice/machine-web.scope"),
        (b"/system.slice/cron.service", b""),
        (b"", b""),
    ],
)
def test_outermost_container(where: bytes, found: bytes) -> None:
    assert outermost(where) == found


A, B = "a" * 64, "b" * 64


@pytest.mark.parametrize(
    ("path", "owner", "share"),
    [
        (f"/docker/{A}", 0, (f"/docker/{A}", f"/docker/{A}")),
        (f"/docker/{A}/x", 0, (f"/docker/{A}", f"/docker/{A}")),
        # a container in a container
        (f"/docker/{A}/k/cri-{B}.scope", 0, (f"/docker/{A}", f"/docker/{A}/k/cri-{B}")),
        (f"/x/docker-{A}.scope", 1000, ("uid 1000", f"/x/docker-{A}")),
        ("/user.slice", 1000, ("uid 1000", "mnt:7")),
        ("/system.slice/cron.service", 0, ("mnt:7", "mnt:7")),
        ("/lxc/web/init.scope", 0, ("/lxc/web", "/lxc/web")),
        ("", 0, ("mnt:7", "mnt:7")),
    ],
)
def test_share_belongs_to_a_place(path: str, owner: int, share: tuple[str, str]) -> None:
    assert cgroup.share(path.encode(), 7, owner) == share


def test_label_of_the_container_around_another_one() -> None:
    pod = f"/machine.slice/machine-libpod_pod_{A}.slice/libpod-{B}.scope"
    assert cgroup.outer_label(f"/docker/{A}/docker-{B}.scope".encode()) == "docker:aaaaaaaaaaaa"
    for alone in (f"/docker/{A}", pod, "/user.slice", ""):
        assert cgroup.outer_label(alone.encode()) is None
    assert cgroup.outermost(pod.encode()).endswith(A.encode())
