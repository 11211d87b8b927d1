"""Sentence embeddings: `use = "embed"`. Its name in plans is `slurmgpu.workloads.embed:Embed`."""

from slurmgpu.workloads.embed.workload import Embed as Embed
