"""Language models: engines, prompts and answers, and sizes and placement of models without loading them.

May import: util. torch and transformers, too.
"""
