"""Join shards into a verified merged.h5, and export it.

May import: code, inputs, page, report, results, run, shards, util, worker and workload.
"""
