"""Judging: `use = "judge"`. Its name in plans is `slurmgpu.workloads.judge:Judge`."""

from slurmgpu.workloads.judge.workload import Judge as Judge
