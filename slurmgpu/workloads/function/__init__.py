"""A function as a workload, for `slurmgpu.map`. Its name in plans is `slurmgpu.workloads.function:Function`."""

from slurmgpu.workloads.function.workload import Function as Function
