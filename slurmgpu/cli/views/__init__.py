"""Views that the commands print.

May import: cli and what lies below; no command.
"""
