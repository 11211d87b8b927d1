"""On which GPUs a model fits, and how it is split.

May import: interface, models and util. No torch.
"""
