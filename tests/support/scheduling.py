"""Which worker of pytest-xdist runs which tests: some have those that wait, for Slurm say, and the others compute."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

WAITING = ("tests/slurm/", "tests/containers/", "tests/local/")
"""The tiers whose tests mostly wait: for leases, queues, and processes that are killed."""
ALONE = "tests/slurm/"
"""The tiers whose tests share only the cluster, which lives as long as its worker: they are scheduled one by one."""


class Scheduling(LoadScopeScheduling):
    """A file at a time, so that its fixtures are made once; as long as there are any, those that wait beside others.

    Half of the workers, of five three, take tests that wait, and the others those that compute; one that has none takes
    the others'. So waiting tests leave no core idle.
    """

    def _split_scope(self, nodeid):
        return nodeid if nodeid.startswith(ALONE) else nodeid.partition("::")[0]

    def _assign_work_unit(self, node):
        workers = sorted(self.nodes, key=lambda each: each.gateway.id)
        waits = workers.index(node) < (len(workers) + 1) // 2 if node in workers else False
        mine = (scope for scope in self.workqueue if scope.startswith(WAITING) == waits)
        scope = next(mine, None)
        if scope is not None:
            self.workqueue.move_to_end(scope, last=False)
        super()._assign_work_unit(node)
