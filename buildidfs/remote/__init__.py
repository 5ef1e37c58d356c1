# SPDX-License-Identifier: Apache-2.0
"""One store for many hosts: a bucket of object storage, and the objects in it.

`Bucket` is the client. `requests` is the program that makes its requests, in another process
(`link`), and alone imports obstore; `listings` reads the pages of listings for it. `objects` has
the keys and the metadata of objects, `filters` the filter that answers most look-ups of absent
build IDs without a request, and `manifests` the lists of files that each host has seen.

These modules know values, bytes and keys. They do not know the store.
"""

from buildidfs.remote.bucket import Bucket, Head

__all__ = ["Bucket", "Head"]
