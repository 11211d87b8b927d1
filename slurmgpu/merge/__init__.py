"""Joining shards into merged.h5, verified; and export from there.

May import: code, inputs, page, report, results, run, shards, util, worker and workload.
"""
