"""The command line: the only place that prints. Results go to stdout, everything else to stderr."""

from __future__ import annotations

import logging
import sys


def main() -> None:
    """The console script: exit codes as docs/reference/cli.md promises them."""
    from slurmgpu.cli.app import app
    from slurmgpu.cli.output import complain
    from slurmgpu.errors import SlurmGPUError

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr)
    try:
        app()
    except SlurmGPUError as error:
        complain(str(error))
        sys.exit(2)
    except (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
        complain(f"{error.filename}: {error.strerror}. Name a path that can be read, or written, here.")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output, `head` say, has seen enough. Nothing is left to be flushed at exit.
        sys.stdout = None
        sys.exit(0)
