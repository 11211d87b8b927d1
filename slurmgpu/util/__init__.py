"""Small helpers: files, hashes, text, processes and GPUs of this machine.

May import: errors.
"""
