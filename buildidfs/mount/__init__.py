# SPDX-License-Identifier: Apache-2.0
"""The FUSE front door: requests of the kernel to the view, and nothing else.

Outsiders use `daemonize` (mount, unmount), `session.run` (serve), and `mountpoint` (options and
state). Within, `operations` answers requests, `loop` feeds them faster than trio would,
`invalidate` tells the kernel which names a commit has changed. The mount knows nothing
of how names are made. Nothing here is imported until a mount is asked for: pyfuse3 and trio take a
tenth of a second.
"""
