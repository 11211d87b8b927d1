"""What is read in the text of answers: labels, numbers, steps and final answers, and metrics of them.

May import: interface and util.
"""
