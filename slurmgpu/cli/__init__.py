"""The command line: the only package that prints. Results go to stdout, everything else to stderr.

May import: all. Nothing but `__main__` imports it.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from slurmgpu.cli.exit_codes import EXIT_BAD_USAGE, EXIT_COMPLETE, EXIT_INCOMPLETE
from slurmgpu.util import early_signals, standard_streams

ANOTHER, ROOM = "Name a path that can be read or written here.", "Free space there, or name a path elsewhere."
SIZE = "Raise your limit on the size of files (`ulimit -f`), or name a path on another file system."
EXPIRED = "Its file system refuses you now: renew your ticket for it (with kinit, for example), or ask its owner."
TO_DO = {
    **dict.fromkeys((errno.ENOENT, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP), ANOTHER),
    **dict.fromkeys((errno.EEXIST, errno.ENOTDIR), "A file is where a folder is needed. Name another path."),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), ROOM),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "Name a path that you may read or write, or ask its owner."),
    **dict.fromkeys((errno.EKEYEXPIRED, errno.ENOKEY, errno.EKEYREVOKED, errno.EKEYREJECTED), EXPIRED),
    errno.EFBIG: SIZE,
    errno.EROFS: "Do this on a machine that can write there, or name another path.",
}
"""Advice for an OSError, by errno; any other one is a bug."""
AGAIN = "Its file system keeps failing, also on retries. Try again later, or on another machine."

SHOWING = {"status", "logs", "export", "show"}
"""Commands that only print, much or without end."""
WATCHING = {"--watch", "-w"}


def main() -> None:
    """The console script; docs/reference/cli.md lists the exit codes."""
    standard_streams.open_missing()
    if sys.argv[1:2] == ["task"]:
        early_signals.remember()
    else:
        early_signals.end_by_exception()
    from slurmgpu.cli.app import app
    from slurmgpu.cli.console import complain
    from slurmgpu.cli.streams import prepare_streams
    from slurmgpu.errors import SlurmGPUError
    from slurmgpu.util.regular_files import UnusableFileError

    prepare_streams(unread=_unread(sys.argv[1:]))
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr)
    try:
        _flushing_stdout(app)
    except SlurmGPUError as error:
        complain(str(error))
        sys.exit(EXIT_BAD_USAGE)
    except KeyboardInterrupt:
        sys.exit(130)
    except UnusableFileError as error:
        complain(f"{error.filename}: {error.strerror}. Remove it, or restore the file that was there.")
        sys.exit(EXIT_BAD_USAGE)
    except (OSError, RuntimeError) as error:
        if (advice := _advice(error)) is None:
            raise
        complain(advice)
        sys.exit(EXIT_BAD_USAGE)
    finally:
        # Imported where there may be code of the user's; else Python's last collections are a fifth of `status`.
        imported_modules = sys.modules.get("slurmgpu.code.imported_modules")
        if imported_modules is None:
            gc.freeze()
        else:
            imported_modules.skip_last_collections()


def _flushing_stdout(app: Callable[[], object]) -> None:
    try:
        app()
    except SystemExit:
        with contextlib.suppress(SystemExit):  # a closed pipe does not change the exit code
            sys.stdout.flush()
        raise
    except BaseException:
        with contextlib.suppress(SystemExit, OSError):  # nor does it hide the error
            sys.stdout.flush()
        raise


def _advice(error: OSError | RuntimeError) -> str | None:
    """What to do about an error of a file system, or a limit on processes; None if it is a bug."""
    from slurmgpu.util.forks import TOO_MANY, is_of_limit
    from slurmgpu.util.shared_files import TRANSIENT

    if is_of_limit(error):
        return TOO_MANY
    if not isinstance(error, OSError):
        return None
    to_do = {**dict.fromkeys(TRANSIENT, AGAIN), **TO_DO}.get(error.errno or 0)
    if error.filename is None and error.errno == errno.EACCES:  # of a file that was open
        to_do = EXPIRED
    if error.filename is None and error.errno == errno.ENOENT and _is_nowhere():
        return f"The working directory: {error.strerror}. It was removed: go to one that exists."
    nameless = {**dict.fromkeys((ROOM, SIZE), "A file that it writes"), EXPIRED: "A file", AGAIN: "A file"}
    where = error.filename or nameless.get(to_do or "")
    return f"{where}: {error.strerror}. {to_do}" if where and to_do else None


def _is_nowhere() -> bool:
    try:
        Path.cwd()
    except FileNotFoundError:
        return True
    return False


def _unread(argv: Sequence[str]) -> int | None:
    """The exit code of a command whose output is no longer read; None for one that continues.

    `status --watch` has not seen the end of the run then, so it exits as for an incomplete run.
    """
    if not SHOWING & set(argv[:1]):
        return None
    return EXIT_INCOMPLETE if argv[0] == "status" and WATCHING & set(argv) else EXIT_COMPLETE
