"""Find, download and measure the files of models and adapters, without loading them.

May import: util. No torch; huggingface_hub if a model is on the hub.
"""
