"""Which workers of pytest-xdist get tests: one that has collected them."""

from types import SimpleNamespace

import pytest

from tests.support.scheduling import Scheduling

MODELS = [f"tests/models/test_judge.py::test_{n}" for n in range(3)]


class Worker:
    """A worker of xdist, as its scheduler sees one."""

    def __init__(self, number):
        self.gateway, self.shutting_down, self.tests = SimpleNamespace(id=f"gw{number}"), False, []

    def shutdown(self):
        self.shutting_down = True

    def send_runtest_some(self, indices):
        self.tests += indices


def a_session(collected):
    """The workers of a session that has begun, of which each has collected these tests."""
    config = SimpleNamespace(
        getvalue=lambda name: ["popen"] * len(collected), option=SimpleNamespace(loadscopereorder=True)
    )
    scheduling = Scheduling(config, SimpleNamespace(loadscopesched=lambda *said: None))
    workers = [Worker(number) for number in range(len(collected))]
    for worker in workers:
        scheduling.add_node(worker)
    for worker, tests in zip(workers, collected, strict=True):
        scheduling.add_node_collection(worker, tests)
    scheduling.schedule()
    return workers


@pytest.mark.parametrize("collected", [[[], MODELS], [MODELS, []], [[], [], MODELS]])
def test_of_workers_beyond_the_files_one_that_has_the_tests_stays(collected):
    """Workers for tests that wait collect none of the tests of models."""
    workers = a_session(collected)
    assert [len(worker.tests) for worker in workers] == list(map(len, collected))
