"""What became of an item, or every failure of a class, and the places in logs that tell of it.

May import: report, logs, run, util.
"""
