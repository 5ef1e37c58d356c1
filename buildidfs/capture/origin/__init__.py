# SPDX-License-Identifier: Apache-2.0
"""The origin of a file: its container, the trust in it, and the users who could reach it.

`builder` makes each `model.Origin`, labels containers and decides who may have written a file.
`container_names` finds the names and images of containers, and `path_access` the users who could
reach a path. All scanners use these modules; nothing here looks for files.
"""
