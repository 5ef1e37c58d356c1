# SPDX-License-Identifier: Apache-2.0
"""Container images: layouts, archives of them, and the storage of engines, layer by layer.

`scanner.ImageScanner` is for commands. `layouts` finds the images, and `layers` reads each layer
once, as a container of the image sees it.
"""
