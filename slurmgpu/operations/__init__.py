"""What the command line and Python do with drafts and runs: submit, probe, resubmit, wait.

May import: all but api, cli and mapping.
"""
