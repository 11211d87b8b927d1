"""From a run file to a frozen plan: everything that can be refused is refused here.

May import: code, containers, inputs, run, report, shards, util and workload.
"""
