"""Parameters of a test that only `make nightly` runs."""

import pytest


def by_night(*values):
    """A set of parameters that says what another set shows by day, in one more way."""
    return pytest.param(*values, marks=pytest.mark.nightly)
