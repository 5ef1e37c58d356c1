# SPDX-License-Identifier: Apache-2.0
"""Images of containers, records of container engines, and paths of control groups.

`oci` reads documents of images, `engine_records` the files that Docker, Podman and others keep,
`cgroup` the label of a container from a path. None of them knows where an engine keeps its files.
"""
