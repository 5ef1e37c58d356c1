# SPDX-License-Identifier: Apache-2.0
"""The page for people, its JSON, and the report: the same answers in three forms.

`site.Page` answers the requests that `serve` passes on; `overview` also makes one file without a
server. `answers` has the values and their schema. `overview`, `build_id`, `search` and `upload`
fill them; `html` and `charts` show them, and `api` describes them. All modules show only facts that
a caller without an account may know (`permissions.PUBLIC`). Names and paths come from strangers,
and the templates escape them.
"""
