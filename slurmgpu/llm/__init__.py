"""Language models: what an engine is, the engines, and what is known of a model without loading it.

May import: code, util. torch and transformers, too.
"""
