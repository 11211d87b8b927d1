"""What an engine is asked and answers, and what all engines share: batches by tokens, and sampling.

May import: models and util.
"""
