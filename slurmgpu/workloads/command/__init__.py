"""Any program as a workload: `use = "command"`. Its name in plans is `slurmgpu.workloads.command:Command`."""

from slurmgpu.workloads.command.workload import Command as Command
