"""Search in logs: the outcome of an item, all failures of a class, and their places.

May import: report, logs, run, util.
"""
