"""From the `use` of a run file to the user's object: found by name, imported, built with its settings, and adapted.

May import: code, workload, util.
"""
