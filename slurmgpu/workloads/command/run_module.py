"""A program that does as `python -m MODULE ARGUMENTS`, with the modules of another folder first.

`python run_module.py FOLDER MODULE ARGUMENTS`. It is also what launchers such as torchrun start in place of a module.
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
    # Not this file's folder, in which there are other modules, but that of the call, as with -m.
    sys.path[:] = [folder, str(Path.cwd()), *(path for path in sys.path if Path(path).resolve() != here)]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
