"""A file system in user space that behaves as an NFS client does, and pretended nodes that each mount it.

One folder of this machine stands for the file server. Each mount stands for a client of it, with caches of its own:
what a client believes of attributes, names, listings and contents is decided here, and nothing is cached by the kernel.
"""
