"""The built-in workloads, a folder each, and their shared modules.

May import: workload, loader, errors, code.functions, shards, run, results, inputs, faults.gpu_trial, and the libraries
llm, training and influence.
"""
