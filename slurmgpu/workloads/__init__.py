"""The built-in workloads, a folder each, and their shared modules.

May import: workload, errors, shards.columns, results, inputs, and the libraries llm, training and influence.
"""
