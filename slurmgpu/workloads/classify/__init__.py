"""Classification: `use = "classify"`. Its name in plans is `slurmgpu.workloads.classify:Classify`."""

from slurmgpu.workloads.classify.workload import Classify as Classify
