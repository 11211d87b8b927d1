"""Log files: how they are written, which belong to an attempt, and their lines in the order of their times.

May import: run, util.
"""
