# SPDX-License-Identifier: Apache-2.0
"""The use cases: the layer that connects scanners, ingest, store and mount.

Each function does the work of one command and returns values; `buildidfs.cli` prints them. In this
table each package imports only from lower lines:

    service                             up, down and status
    page                                the page for people, its JSON, the report
    live, doctor, why                   the watch, the examination of the machine, missing names
    fleet                               pushes, fetches, and questions about all hosts
    inputs, bundle, upkeep              use cases that combine several of those below
    profile, cores, check               profiles of perf, core files, the check of a store
    symbolize                           names for addresses, and the programs that know them
    catalog                             lists of artifacts
    requested_id                        the build ID that a user means
    history, survey                     the build IDs that a path had, counts of a store
    containers                          names and files of containers
    capture, coverage, source_files     scans, shares of profiles, source files
    remedies                            reasons for missing names

Nothing here reads argv or the terminal, decodes bytes, or uses lmdb.
"""
