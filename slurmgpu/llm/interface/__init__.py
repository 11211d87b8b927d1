"""Requests to an engine and its answers, and code that all engines share: batches by tokens, and sampling.

May import: models and util.
"""
