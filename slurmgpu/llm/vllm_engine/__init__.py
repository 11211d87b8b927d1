"""The engine on vLLM.

May import: transformers_engine, for what both do with tokens, and what that may. vLLM.
"""
