# SPDX-License-Identifier: Apache-2.0
"""Questions of people to a store, answered with values.

`artifacts` lists files, `containers` and `history` find them by container and path, `survey` counts
them, and `coverage` says which share of something can be named. `requested_id` finds the build ID
that a user means, `source_files` captures the sources that debuginfo names, and `remedies` has the
reasons for missing names. Nothing here knows profiles, or prints.
"""
