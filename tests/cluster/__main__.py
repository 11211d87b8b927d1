"""`python -m tests.cluster start|stop [FOLDER]`: a cluster to play with."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from . import Cluster, ClusterError
from .config import state_file


def main() -> int:
    """Start or stop; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.cluster",
        description='After eval "$(python -m tests.cluster start)", this shell\'s sbatch uses a private Slurm.',
    )
    parser.add_argument("action", choices=("start", "stop"))
    parser.add_argument("folder", nargs="?", type=Path, default=Path("/tmp/test-cluster"), help="default: %(default)s")
    parser.add_argument("--when-input-ends", action="store_true", help="stop it once whoever holds the pipe has died")
    arguments = parser.parse_args()
    if arguments.when_input_ends:
        sys.stdin.read()
        if not state_file(arguments.folder).exists():
            return 0  # it was stopped, or never started
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
