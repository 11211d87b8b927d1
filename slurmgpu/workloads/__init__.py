"""The built-in workloads, a folder each, and what several of them share: modules, and `grading`.

May import: workload, loader, errors, code.functions, shards, run, results, inputs, faults.gpu_trial, and the libraries
llm, training and influence.
"""
