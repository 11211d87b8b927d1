"""Apptainer: images, the command that runs a worker in one, and its complaints in words. Nothing else knows it.

May import: util, errors. Nothing else knows a runtime's options.
"""

INSIDE = "/opt/slurmgpu"
"""Where slurmgpu, and what the workload is imported from, lie in the container: its PYTHONPATH."""
