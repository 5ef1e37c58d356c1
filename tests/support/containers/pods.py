# SPDX-License-Identifier: Apache-2.0
"""A privileged container with the files of the host, as a pod of Kubernetes has it, run by crun."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from buildidfs.linux.credentials import effective_capabilities
from tests.support.clients.tools import Argument, Result, run, tool

NAME = "pod-7f9c4d"
"""What the pod is called, and its machine in the eyes of those inside."""

_number = count()

# crun refuses the hybrid layout of cgroups, so it is shown the unified hierarchy only.
_SCRIPT = """
set -eu
mkdir "$1/root"
mount --rbind / "$1/root"
if [ "$(stat -f -c %T /sys/fs/cgroup)" != cgroup2fs ]; then
    umount -R /sys/fs/cgroup 2>/dev/null || : # not mounted at all, in a bare root
    mount -t cgroup2 none /sys/fs/cgroup
fi
code=0
"$2" --root "$1/state" run --bundle "$1" "$3" || code=$?
rmdir "/sys/fs/cgroup/$3" 2>/dev/null || :
exit $code
"""


def in_pod(
    directory: Path,
    words: Sequence[Argument],
    *,
    host_pid: bool,
    environ: Mapping[str, str] | None = None,
) -> Result:
    """Run ``words`` in a pod, until they end.

    ``host_pid`` is what ``hostPID: true`` says: the processes of the host are in sight.
    ``directory`` must not exist; what the pod writes outside of it is written to the host.
    """
    directory.mkdir()
    name = f"buildidfs-pod-{os.getpid()}-{next(_number)}"
    configuration = _configuration(name, [os.fsdecode(word) for word in words], environ or {})
    namespaces = ["mount", "uts", "ipc", *([] if host_pid else ["pid"])]
    configuration["linux"]["namespaces"] = [{"type": each} for each in namespaces]
    configuration["root"]["path"] = str(directory / "root")
    (directory / "config.json").write_text(json.dumps(configuration))
    return run(
        [tool("unshare"), "-m", "sh", "-c", _SCRIPT, "sh", directory, tool("crun"), name],
        check=False,
    )


def _configuration(name: str, words: list[str], environ: Mapping[str, str]) -> dict[str, Any]:
    every = sorted(effective_capabilities())
    capabilities = ("bounding", "effective", "inheritable", "permitted")
    variables = {"PATH": os.environ["PATH"], "HOME": "/root", **environ}
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": words,
            "env": [f"{key}={value}" for key, value in variables.items()],
            "cwd": os.getcwd(),
            "capabilities": dict.fromkeys(capabilities, every),
        },
        "root": {},
        "hostname": NAME,
        "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}],
        "linux": {"cgroupsPath": f"/{name}"},
    }
