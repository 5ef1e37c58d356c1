# SPDX-License-Identifier: Apache-2.0
"""Files on filesystems that may never answer: FUSE or network servers that hang, maybe on purpose.

`filesystems` tells which ones those are, without asking them. A question to a filesystem of the
network goes to a thread, see `filesystems.Patience`. A thread that waits for a FUSE server cannot
be ended, and keeps its process from ending, so a process asks those: `file_helper.FileHelper`
looks at files and copies them, `as_owner.AsOwner` does so as the user who mounted the filesystem.
`file_helper.check_readable` tries a file that the operator named before a command reads it.
Nothing here knows a store or a scanner.
"""
