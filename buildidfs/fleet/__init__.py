# SPDX-License-Identifier: Apache-2.0
"""One store for many hosts: a bucket of object storage, and what hosts do with it.

`bucket.Bucket` is the client. `requests` is the program that makes its requests, in another process
(`link`), and alone imports obstore; `listings` reads the pages of listings for it. `objects` has
the keys and the metadata of objects, `filters` the filter that answers most look-ups of absent
build IDs without a request, and `manifests` the lists of files that each host has seen.

`remote_files` finds files in buckets on demand, `ranges` reads them, and `tiered_store.TieredStore`
is a store that includes those that were found; `reading` opens one. `push` uploads the files of a
store, once or after each commit (`changes`), and `ledger` remembers them. `questions` answers from
the manifests of all hosts. Nothing here knows the names in a mount or a server.
"""
