"""Which worker of pytest-xdist runs which tests: some have those that compute, and the others wait, for Slurm say."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

WAITING = ("tests/slurm/", "tests/containers/", "tests/local/")
"""The tiers whose tests mostly wait: for leases, queues, and processes that are killed."""
ALONE = "tests/slurm/"
"""The tiers whose tests share only the cluster, which lives as long as its worker: they are scheduled one by one."""
MODELS = "tests/models/"
"""The tier whose collection takes as long as that of all others, for PyTorch, transformers and PyKEEN."""


def waits(worker_id, n_workers):
    """Whether a worker has tests that wait: half of them do, of five three. One in a dead one's place has all tests."""
    return n_workers // 2 <= int(worker_id.removeprefix("gw")) < n_workers


class Scheduling(LoadScopeScheduling):
    """A file at a time, so that its fixtures are made once; as long as there are any, those that wait beside others.

    A worker that has none of its kind takes the others', so that waiting tests leave no core idle; those with models
    it takes only if it has collected them, see `pytest_configure_node` of tests/conftest.py.
    """

    def _split_scope(self, nodeid):
        return nodeid if nodeid.startswith(ALONE) else nodeid.partition("::")[0]

    def _check_nodes_have_same_collection(self):
        whole, *others = sorted(self.registered_collections.items(), key=lambda each: -len(each[1]))
        for node, found in others:
            missing = set(whole[1]) ^ set(found)
            assert all(each.startswith(MODELS) for each in missing), f"{node.gateway.id} has collected other tests"
        self.registered_collections = dict([whole, *others])  # the first are the tests that are run
        by_size = sorted(self.assigned_work.items(), key=lambda each: -len(self.registered_collections[each[0]]))
        self.assigned_work = dict(by_size)  # of workers beyond the scopes, xdist shuts down those at the end
        return True

    def remove_node(self, node):
        """Of a dead worker's tests, leave to others those that are not done: one without any would wait for ever."""
        crashed = super().remove_node(node)
        for scope, tests in [*self.workqueue.items()]:
            tests.update({crashed: True} if crashed in tests else {})
            if all(tests.values()):
                del self.workqueue[scope]
        return crashed

    def _assign_work_unit(self, node):
        collected = set(self.registered_collections[node])
        possible = [scope for scope, tests in self.workqueue.items() if collected.issuperset([*tests][:1])]
        if not possible:
            node.shutdown()
            return
        its_own = (scope for scope in possible if scope.startswith(WAITING) == waits(node.gateway.id, self.numnodes))
        self.workqueue.move_to_end(next(its_own, possible[0]), last=False)
        super()._assign_work_unit(node)
