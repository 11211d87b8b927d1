"""Log files: those of an attempt, and their lines ordered by time.

May import: run, util.
"""
