"""Find labels, numbers, steps and final answers in answers, and compute their metrics.

May import: interface and util.
"""
