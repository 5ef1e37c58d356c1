# SPDX-License-Identifier: Apache-2.0
"""The directories of the mount, each as its readers look for files."""
