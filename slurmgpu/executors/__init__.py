"""Executors run tasks: on Slurm, on this machine, in this process, or in jobs that users submit themselves.

May import: all but api, cli, mapping and operations.
"""
