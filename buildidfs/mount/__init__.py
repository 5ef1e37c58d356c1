# SPDX-License-Identifier: Apache-2.0
"""The FUSE front door: requests of the kernel to the view, and nothing else.

`session` is what the outside uses (mount, unmount); `operations` answers requests, `loop` feeds
them to it faster than trio would, `invalidate` tells the kernel what a commit has made untrue.
Nothing here is imported until a mount is asked for: pyfuse3 and trio take a tenth of a second.
"""
