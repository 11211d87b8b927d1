"""How likely texts are: `use = "perplexity"`. Its name in plans is `slurmgpu.workloads.perplexity:Perplexity`."""

from slurmgpu.workloads.perplexity.workload import Perplexity as Perplexity
