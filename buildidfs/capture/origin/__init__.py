# SPDX-License-Identifier: Apache-2.0
"""The origin of a file: its container, the trust in it, and the users who can get at it.

`builder` makes each `model.Origin`. `container` labels containers, `container_names` tells their
images, `ownership` whether an owner counts, and `path_access` who could reach a path. All scanners
use these; nothing here looks for files.
"""
