"""From an item to the tokens of a prompt, and from tokens to an answer's text.

May import: interface, models and util. Jinja for templates, a tokenizer, llguidance for structures, Pillow for images.
"""
