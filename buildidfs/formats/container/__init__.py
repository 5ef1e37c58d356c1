# SPDX-License-Identifier: Apache-2.0
"""Images of containers, records of container engines, and paths of control groups.

`oci` decodes documents of images, `engine_records` the state files of Docker, Podman and others,
`cgroup` the label of a container in a path. None of them knows where an engine keeps its files.
"""
