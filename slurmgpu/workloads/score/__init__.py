"""Scores of trained heads: `use = "score"`. Its name in plans is `slurmgpu.workloads.score:Score`."""

from slurmgpu.workloads.score.workload import Score as Score
