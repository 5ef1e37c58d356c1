# SPDX-License-Identifier: Apache-2.0
"""The processes behind `buildidfs up`, `down` and `status`.

`up` starts and finds the processes of a store, `supervise` keeps them running, `status` examines
them. Nothing here captures or serves files itself.
"""
