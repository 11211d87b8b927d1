"""Parameters of a test that only `make nightly` runs."""

import pytest


def by_night(*values):
    """A parameter set for the nightly tests; it repeats, in another way, what a set of `make test` shows."""
    return pytest.param(*values, marks=pytest.mark.nightly)
