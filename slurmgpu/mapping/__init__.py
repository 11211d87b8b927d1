"""`slurmgpu.map`: map a function over items from Python, as a run.

May import: api and everything below it.
"""
