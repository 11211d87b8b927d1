"""The engine on transformers: loading, caches, static and continuous batches, scores.

May import: prompts, placement, interface, models and util. torch and transformers.
"""
