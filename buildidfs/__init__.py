# SPDX-License-Identifier: Apache-2.0
"""Every binary a host ever ran, readable by build ID, after the container is gone."""

__version__ = "0.2.0"
