"""The engine for a server with OpenAI's protocol: its process, its client and its settings.

May import: prompts, interface, models and util.
"""
