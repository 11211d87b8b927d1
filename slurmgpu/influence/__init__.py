"""Influences of training examples on test examples (TracIn), exact, from factored gradients.

Independent of models: each model defines the factors of its gradients (`gradients.Differentiable`). Every module except
this one and `results` imports torch, so import them where a model is loaded.

May import: errors. torch, too.
"""
