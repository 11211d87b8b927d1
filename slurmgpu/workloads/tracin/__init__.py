"""TracIn influence: `use = "tracin"`. Its name in plans is `slurmgpu.workloads.tracin:Tracin`."""

from slurmgpu.workloads.tracin.workload import Tracin as Tracin
