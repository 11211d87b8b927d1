"""Where tasks run: on Slurm, on this machine, in this process, or in jobs that were submitted by hand.

May import: all but cli and api.
"""
