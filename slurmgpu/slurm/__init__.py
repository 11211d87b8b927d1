"""What Slurm says and takes: its commands, queue, accounting and limits.

May import: report, run, util.
"""
