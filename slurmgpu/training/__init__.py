"""Train one model on one or several processes: the loop, batches and checkpoints.

Knows no workload, item or run: `loop.Training` trains what a user's class describes, with
`settings.TrainingSettings`, at a `ranks.Place`. Only this module, `metric_monitor`, `outcome`, `settings` and
`user_methods` import without torch.

May import: util. torch, too.
"""
