"""Labels, numbers, steps and final answers in the text of answers, and metrics of them.

May import: interface and util.
"""
