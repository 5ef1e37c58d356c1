# SPDX-License-Identifier: Apache-2.0
"""Every binary a host ever ran, readable by build ID, after the container is gone.

The public API is `Store`, `BuildId`, `Kind` and `Artifact`, described in docs/python.md, and the
exceptions of `buildidfs.errors`. All other names are private and may change with each version. Each
name is imported on its first use, so ``import buildidfs`` costs nothing.
"""

__version__ = "1.0.0"
__all__ = ["Artifact", "BuildId", "Kind", "Store", "__version__"]

_MODULES = {"Artifact": "model", "BuildId": "model", "Kind": "model", "Store": "api"}


def __getattr__(name: str) -> object:
    """Import a public name on its first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
