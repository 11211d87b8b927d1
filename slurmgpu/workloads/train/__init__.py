"""Training: `use = "train"`. Its name in plans is `slurmgpu.workloads.train:Train`."""

from slurmgpu.workloads.train.workload import Train as Train
