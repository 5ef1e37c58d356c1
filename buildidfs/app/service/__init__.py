# SPDX-License-Identifier: Apache-2.0
"""What `buildidfs up`, `down` and `status` do."""
