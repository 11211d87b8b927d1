"""Slurm's interface: its commands, queue, accounting and limits.

May import: report, run, util.
"""
