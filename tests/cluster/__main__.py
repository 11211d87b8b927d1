"""`python -m tests.cluster start|stop [FOLDER]`: a cluster to play with."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from . import Cluster, ClusterError


def main() -> int:
    """Start or stop; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.cluster",
        description='After eval "$(python -m tests.cluster start)", this shell\'s sbatch uses a private Slurm.',
    )
    parser.add_argument("action", choices=("start", "stop"))
    parser.add_argument("folder", nargs="?", type=Path, default=Path("/tmp/test-cluster"), help="default: %(default)s")
    arguments = parser.parse_args()
    try:
        if arguments.action == "stop":
            Cluster.open(arguments.folder).stop()
            return 0
        cluster = Cluster.start(arguments.folder)
    except ClusterError as error:
        print(error, file=sys.stderr)
        return 1
    for name, value in cluster.env.items():
        print(f"export {name}={shlex.quote(value)}")
    if cluster.cgroup_note:
        print(cluster.cgroup_note, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
