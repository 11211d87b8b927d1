"""Runs on pretended nodes that share a file server by NFS's rules, with faults of every kind, and what came of them."""
