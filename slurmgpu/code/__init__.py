"""Snapshots of the user's modules: traced, kept in the run directory, and imported from there.

May import: run, shards, containers, util.
"""
