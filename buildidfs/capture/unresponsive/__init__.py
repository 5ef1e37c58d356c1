# SPDX-License-Identifier: Apache-2.0
"""Files on filesystems that may never answer: FUSE or network servers that hang, maybe on purpose.

`filesystems` recognises them without asking them. Network filesystems are accessed by a thread, see
`filesystems.Patience`. A thread that waits for a FUSE server cannot be ended, and keeps its process
from ending, so FUSE filesystems are accessed by a helper process, `file_helper.FileHelper`.
`file_helper.check_readable` tries a file that the operator named before a command reads it. Nothing
here knows a store or a scanner. Processes that may never answer are the matter of
`process.silent_processes`, which needs their owners, and so the layer `origin` above this one.
"""
