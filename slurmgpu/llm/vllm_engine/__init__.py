"""The engine on vLLM.

May import: prompts, placement, interface, models and util. vLLM, and PyTorch and transformers, which it brings.
"""
