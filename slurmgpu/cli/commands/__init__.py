"""What each command does.

May import: cli/views, cli, api and what lies below.
"""
