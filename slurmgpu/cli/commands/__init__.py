"""The commands.

May import: cli/views, cli, api and what lies below.
"""
