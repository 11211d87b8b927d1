"""Files of models and adapters: found, downloaded, and measured without loading them.

May import: util. No torch; huggingface_hub where a model is on the hub.
"""
