"""A private, real Slurm on one machine, started in seconds; see README.md beside this file."""

from .cluster import Cluster, missing
from .processes import ClusterError

__all__ = ["Cluster", "ClusterError", "missing"]
