"""Join shards into a verified merged.h5, export its rows, and compare them with those of another run.

May import: code, inputs, page, report, results, run, shards, util, worker and loader.
"""
