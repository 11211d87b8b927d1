"""`python -m slurmgpu` is the command line."""

from slurmgpu.cli import main

if __name__ == "__main__":
    main()
