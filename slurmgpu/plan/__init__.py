"""Turn a run file into a frozen plan: whatever can be checked before submission is checked here.

May import: code, containers, inputs, run, report, shards, util and workload.
"""
