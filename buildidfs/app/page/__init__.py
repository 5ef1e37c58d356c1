# SPDX-License-Identifier: Apache-2.0
"""The page for people, its JSON, and the report: one set of answers in three forms.

`site.Page` answers the requests that `serve` hands on; `overview` also makes one file without a
server. `answers` has the values and their schema. `overview`, `build_id`, `search` and `drop` fill
them; `html` and `charts` show them, and `api` describes them.
All modules tell only what a caller without an account may know (`view.PUBLIC`). Names and paths
come from strangers, and the templates escape them.
"""
