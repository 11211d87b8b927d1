"""Rows as verified bytes: columns, and HDF5 files with a checksum for each region.

May import: util. Knows no run.
"""
