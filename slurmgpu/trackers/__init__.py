"""Experiment trackers, to which `slurmgpu track` replays what tasks logged. Tasks never contact one.

May import: inputs, plan, report, run, util and errors. The trackers' own packages, each in its module.
"""
