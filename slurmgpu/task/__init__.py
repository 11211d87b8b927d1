"""Supervise a task on its node: its workers, its other nodes, leases, telemetry.

May import: code, containers, faults, plan, run, shards, util, worker. Never imports the workload.
"""
