"""A program that runs like `python -m MODULE ARGUMENTS`, with the modules of another folder first.

`python run_module.py FOLDER MODULE ARGUMENTS`. Launchers such as torchrun also start it instead of a module.
Standard library only, of any Python 3.
"""

import runpy
import sys
from pathlib import Path


def main() -> None:
    """Run the module that the command line names."""
    folder, module = sys.argv[1:3]
    del sys.argv[1:3]
    here = Path(__file__).resolve().parent
    # The call's folder, as with -m, and not this file's folder, which has other modules.
    sys.path[:] = [folder, str(Path.cwd()), *(path for path in sys.path if Path(path).resolve() != here)]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
