"""Models with a trained head: classifiers, reward models, rerankers.

May import: transformers_engine, for loading, and everything that it may import.
"""
