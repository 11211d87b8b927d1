"""Compute status and report of a run: attempts, states, use of hours, time left.

May import: run, shards, code, util. Reads only files.
"""
