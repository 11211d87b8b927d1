"""The proof on a GPU: `make test-gpu`, or `python -m tests.gpu [PART…]`.

Each part is a module of findings, which runs in its own process. A finding is a function whose docstring says what must
hold; it returns the figures that show it. Without a GPU all findings run on the CPU at a toy size, which proves
nothing, but shows that their code runs.
"""
