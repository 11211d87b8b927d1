"""The engine stays within its memory, however many training and test examples there are."""

import pytest

MEASURE = """
import sys, torch
from pathlib import Path
from slurmgpu.influence.influences import Checkpoint, Influences, Options
from slurmgpu.influence.gradients import Gradients
from slurmgpu.influence.parts import Dense, Outer
from slurmgpu.influence.table_parts import Rows

torch.set_num_threads(1)
n_tests, n_train, memory_bytes = map(int, sys.argv[1:])
WIDTH = 1000

class Synthetic:
    '''Gradients of every kind, from a table of random numbers; large next to what they are computed from.'''

    def __init__(self):
        self.table = torch.randn(50, WIDTH)
        self.parameters = {name: torch.zeros(1, requires_grad=True) for name in ("matrix", "vector", "rows")}
        self.groups = {name: name for name in self.parameters}

    def parameters_by_name(self):
        return self.parameters

    def gradients(self, examples, side, wanted):
        index = examples[:, 0] % 50
        parts = {
            "matrix": Outer(self.table[index, :100], self.table[index], torch.arange(len(index))),
            "vector": Dense(self.table[index]),
            "rows": Rows(examples, self.table[index][:, None].repeat(1, 2, 1)),
        }
        return Gradients((parts,), index.float(), index.float())

    def order(self, examples):
        return torch.arange(len(examples))

    def bytes_of_work(self, side):
        return self.bytes_of_result(side)

    def bytes_of_result(self, side):
        return 4 * 4100 + 8 * 3

def megabytes(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1000

model = Synthetic()
train = torch.randint(0, 100_000, (n_train, 2))
engine = Influences([Checkpoint(model, 1.0)], train, Options(tuple(model.groups), 10, memory_bytes=memory_bytes))
model.table[:64, :64] @ model.table[:64, :64].T
before, code = megabytes("VmRSS"), megabytes("RssFile")
Path("/proc/self/clear_refs").write_text("5")
engine.of(train[:n_tests])
code = megabytes("RssFile") - code  # PyTorch's, that is loaded on first use
print(megabytes("VmHWM") - before - code, engine.tests_at_once, engine.chunk_size)
"""


@pytest.mark.parametrize(("n_tests", "n_train"), [(50, 3000), (50, 100_000), (1000, 3000)])
def test_memory_is_bounded(n_tests, n_train, slurmgpu):
    memory_mb = 40
    done = slurmgpu.code(MEASURE, n_tests, n_train, memory_mb * 10**6)
    peak, tests_at_once, chunk_size = map(float, done.stdout.split())
    assert 500 < chunk_size <= 1024
    assert 200 < tests_at_once < 1000
    # Beside it: the allocator's gaps.
    assert peak < memory_mb + 10
