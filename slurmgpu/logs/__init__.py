"""Find the log files of an attempt, and read their lines ordered by time.

May import: run, util.
"""
