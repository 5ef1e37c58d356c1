# SPDX-License-Identifier: Apache-2.0
"""The origin of a file: its container, the trust in it, and the users who could reach it.

`builder` makes each `model.Origin`. `container` labels containers, `container_names` finds their
names and images, `trust` decides who may have written a file, and `path_access` finds the users
who could reach a path. All scanners use these modules; nothing here looks for files.
"""
