"""Influences of training examples on test examples (TracIn), exactly, from gradients that are kept as factors.

Nothing in here knows a model: what a gradient's factors are is the model's business (`models.Differentiable`). Every
module but this one imports torch, so import them where a model is loaded.

May import: errors. torch, too.
"""
