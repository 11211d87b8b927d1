"""The worker process, in the image if there is one: claims, computes and publishes shards.

May import: code, faults, inputs, logs, run, shards, util, loader and workload; the standard library, NumPy and h5py.
"""
