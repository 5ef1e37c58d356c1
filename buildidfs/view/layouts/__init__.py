# SPDX-License-Identifier: Apache-2.0
"""One module for each tree below the root, all of the same shape; `view.tree` alone uses them.

A layout answers ``lookup(node, name)`` and ``children(node, after)``, tells of an entry whether it
``is_public``, and for one that is not at which ``places`` a viewer could have seen it. A layout
knows the store and `view.nodes`, but no front door.
"""
