"""What became of a run: status and report, attempts and states, where hours went, and how long it takes.

May import: run, shards, code, util. Reads files alone.
"""
