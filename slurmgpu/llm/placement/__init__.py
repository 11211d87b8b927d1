"""Whether a model fits on a task's GPUs, and how it is split.

May import: interface, models and util. No torch.
"""
