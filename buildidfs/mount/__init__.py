# SPDX-License-Identifier: Apache-2.0
"""The FUSE front door: it passes requests of the kernel to the view.

Outsiders use `daemonize` (mount, unmount), `session.run` (serve), and `mountpoint` (options and
state). Within, `operations` answers requests, `loop` feeds them faster than trio would,
`invalidate` tells the kernel which names a commit has changed. The mount does not define names. Its
modules are imported only for a mount, because pyfuse3 and trio take a tenth of a second.
"""
