# SPDX-License-Identifier: Apache-2.0
"""The use cases: the layer that connects scanners, ingest, store and mount.

Each function does the work of one command and returns values; `buildidfs.cli` prints them. In this
table each package imports only from lower lines:

    service                             up, down and status
    page                                the page for people, its JSON, the report
    live, doctor                        the watch, the examination of the machine
    inputs, bundle, upkeep              use cases that combine several of those below
    profile, cores, check               profiles of perf, core files, the check of a store
    symbolize, symbolizers              names for addresses, and the programs that know them
    capture, sources, coverage, catalog, history     scans, and questions to a store

Nothing here reads argv or the terminal, decodes bytes, or uses lmdb.
"""
