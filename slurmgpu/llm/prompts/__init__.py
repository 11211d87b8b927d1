"""Make prompts and their tokens from items, and answers from tokens.

May import: interface, models and util. Jinja for templates, a tokenizer, llguidance for structures; for images
Pillow, and the processor of a model in transformers.
"""
