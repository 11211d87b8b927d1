"""Faults of a GPU, in the items of a short run. Its name in plans is `slurmgpu.workloads.gpu_trial:Trial`."""

from slurmgpu.workloads.gpu_trial.workload import Trial as Trial
