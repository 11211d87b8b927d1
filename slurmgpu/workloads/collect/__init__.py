"""Reasoning paths with values: `use = "collect"`. Its name in plans is `slurmgpu.workloads.collect:Collect`."""

from slurmgpu.workloads.collect.workload import Collect as Collect
