"""Where tasks run: on Slurm, on this machine, or in this process."""
