"""The workloads that come with slurmgpu, a folder each, and what those with a language model share.

May import: workload, errors, shards.columns, results, inputs, and the libraries llm, training and influence.
"""
