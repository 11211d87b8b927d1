"""Text generation: `use = "generate"`. Its name in plans is `slurmgpu.workloads.generate:Generate`."""

from slurmgpu.workloads.generate.workload import Generate as Generate
