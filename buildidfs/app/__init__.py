# SPDX-License-Identifier: Apache-2.0
"""The use cases: the one place where scanners, ingest, store and mount are put together.

Each function is what one command does, and returns values; `buildidfs.cli` prints them. From the
top down, each imports only from below:

    service                             up, down and status
    page                                the page for people, its JSON, the report
    live, doctor                        the watch, the examination of the machine
    inputs, bundle, upkeep              what needs several of those below
    profile, cores, check               profiles of perf, core files, the check of a store
    symbolize, symbolizers              names for addresses, and the programs that know them
    capture, sources, coverage, catalog, history     scans, and questions to a store

Nothing here reads argv or the terminal, decodes bytes, or knows lmdb.
"""
