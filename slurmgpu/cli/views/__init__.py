"""What the commands draw.

May import: cli and what lies below; no command.
"""
