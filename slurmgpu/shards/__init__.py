"""Rows as verified bytes: columns, and the HDF5 files that hold them with a checksum for each region.

May import: util. Knows no run.
"""
