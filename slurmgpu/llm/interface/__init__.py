"""Questions to an engine and its answers, and the code that all engines share: batches by tokens, and sampling.

May import: models and util.
"""
