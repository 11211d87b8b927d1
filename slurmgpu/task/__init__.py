"""Processes on the node: one supervisor for each allocation, its workers, its other nodes, telemetry.

May import: code, containers, faults, plan, run, shards, util, worker. Never imports the workload.
"""
