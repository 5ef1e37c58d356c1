# SPDX-License-Identifier: Apache-2.0
"""Cgroup paths, and the names of containers in them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buildidfs.formats.cgroup import container_label, path

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
        b"/docker/" + ID + b"0",
        b"/kubepods.slice",
    ],
)
def test_what_is_no_container(where: bytes) -> None:
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
