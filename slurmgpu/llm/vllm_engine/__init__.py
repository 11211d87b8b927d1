"""The engine on vLLM.

May import: transformers_engine, for shared code on tokens, and everything that it may import. vLLM.
"""
