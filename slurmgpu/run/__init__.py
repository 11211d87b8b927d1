"""The run directory: one module for each file format, the frozen plan, claims, records and the lock.

May import: shards, containers, util.
"""
