# SPDX-License-Identifier: Apache-2.0
# The types of the names that __init__.py imports when they are used first.

from buildidfs.api import Store as Store
from buildidfs.model import Artifact as Artifact
from buildidfs.model import BuildId as BuildId
from buildidfs.model import Kind as Kind

__version__: str
__all__ = ["Artifact", "BuildId", "Kind", "Store", "__version__"]
