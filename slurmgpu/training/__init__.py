"""Training one model: the loop, its batches, its checkpoints, on one process or several.

Nothing in here knows a workload, an item or a run: `loop.Training` trains what a user's class describes, with
`settings.TrainingSettings`, at a `places.Place`. All modules but `settings`, `places` and this one import torch.

May import: util. torch, too.
"""
