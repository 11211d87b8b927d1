"""The proof on a GPU: `make test-gpu`, or `python -m tests.gpu [PART…]`.

Each part is a module of findings, computed in a process of its own. A finding is a function with a docstring that says
what must hold; it returns the figures that show it. Without a GPU all run on the CPU at a toy size, which proves
nothing, and shows that the kit works.
"""
