# SPDX-License-Identifier: Apache-2.0
"""One module for each tree below the root, all with the same interface; only `view.tree` uses them.

A layout has ``lookup(node, name)`` and ``children(node, after)``. It says if an entry
``is_public``, and for other entries at which ``places`` a viewer could have seen the file. A layout
knows the store and `view.nodes`, but neither mount nor server.
"""
