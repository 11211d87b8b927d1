"""Runs over pretended NFS mounts, one for each way of mounting; `make chaos` has the long trials."""

import pytest

from tests.chaos.trial import SETTINGS, Trial
from tests.cluster.fixture import leave_out
from tests.pretend_nfs.nodes import missing
from tests.support.nightly import by_night

BY_DAY = {"caches", "faults"}


@pytest.mark.parametrize("name", [each if each in BY_DAY else by_night(each) for each in SETTINGS])
def test_a_run_over_nfs_is_whole_and_says_so(name, tmp_path):
    if reason := missing():
        leave_out(reason)
    with Trial(tmp_path / "nfs", SETTINGS[name], seed=1, n_items=120) as trial:
        outcome = trial.go(n_late=1)
    assert outcome.is_right, outcome
    assert outcome.faults.total() > (5 if SETTINGS[name].rates else 0)
    if not SETTINGS[name].rates:
        assert not outcome.failed_tasks
        assert not outcome.failed_commands
