# SPDX-License-Identifier: Apache-2.0
"""perf.data files, records of perf events, output of perf script."""
