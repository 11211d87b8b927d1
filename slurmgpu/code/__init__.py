"""The user's own modules: traced, kept as snapshots in the run directory, imported from there.

May import: run, shards, containers, util.
"""
