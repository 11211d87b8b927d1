"""Operations on drafts and runs that the command line and Python share: submit, probe, resubmit, wait.

May import: all but api, cli and mapping.
"""
