"""Load the workload that `use` in a run file names: find it, import it, build it with its settings, and adapt it.

May import: code, workload, util.
"""
