"""find_batch_size: what it tries, what it answers, and that it leaves nothing behind."""

import contextlib
import random
import weakref

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from slurmgpu import find_batch_size
from slurmgpu.training import batch_size
from slurmgpu.util.out_of_memory import is_out_of_memory


def tried(most, **options):
    """What is found where batches of up to `most` fit, and all that was tried for it."""
    sizes = []

    def fn(size):
        sizes.append(size)
        if size > most:
            raise MemoryError(f"no room for {size}")

    return find_batch_size(fn, device="cpu", **options), sizes


@pytest.mark.parametrize(
    ("most", "options", "found", "sizes"),
    [
        (33, {}, 32, [1, 2, 4, 8, 16, 32, 64, 48, 40]),
        (60, {}, 56, [1, 2, 4, 8, 16, 32, 64, 48, 56]),
        (3, {}, 3, [1, 2, 4, 3]),
        (1, {}, 1, [1, 2]),
        (99, {"limit": 24}, 24, [1, 2, 4, 8, 16, 24]),
        (99, {"limit": 24, "start": 64}, 24, [24]),
        (5, {"start": 32}, 5, [32, 16, 8, 4, 6, 5]),
        (20, {"sizes": [1, 2, 3, 4, 6, 8, 12, 16, 24, 48]}, 16, [1, 2, 4, 8, 16, 24]),
        (20, {"sizes": [48, 3, 5, 40, 50]}, 5, [3, 5, 40]),
        (45, {"sizes": range(8, 64), "start": 16}, 45, [16, 32, 63, 48, 40, 44, 46, 45]),
        (9, {"sizes": [4, 8, 16], "limit": 10}, 8, [4, 8]),
    ],
)
def test_the_largest_that_fits_is_found_by_doubling_and_halving(most, options, found, sizes):
    assert tried(most, **options) == (found, sizes)


def test_a_function_that_needs_no_memory_ends_the_search_at_a_limit(monkeypatch):
    monkeypatch.setattr(batch_size, "LIMIT", 5)
    assert tried(10**9) == (5, [1, 2, 4, 5])


def test_where_nothing_fits_the_error_is_one_of_memory():
    with pytest.raises(MemoryError, match=r"out of memory at the smallest, 2: no room for 2") as caught:
        tried(1, sizes=[2, 4])
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize("options", [{"start": 0}, {"limit": 0}, {"sizes": []}, {"sizes": [0, 1]}])
def test_sizes_that_cannot_be_are_refused(options):
    with pytest.raises(ValueError, match="expected sizes of at least 1"):
        tried(1, **options)


def test_other_errors_go_through():
    with pytest.raises(RuntimeError, match="shapes"):
        find_batch_size(lambda size: (_ for _ in ()).throw(RuntimeError("shapes")), device="cpu")


def test_random_numbers_go_on_as_if_nothing_had_been_tried():
    def draw():
        return random.random(), np.random.random(), torch.rand(1).item()

    def fn(size):
        draw()
        if size > 4:
            raise MemoryError

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = draw()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    assert find_batch_size(fn, device="cpu") == 4
    assert draw() == expected


def test_what_a_try_allocated_is_gone_before_the_next():
    left = []

    def fn(size):
        assert not [ref for ref in left if ref() is not None]
        tensor = torch.zeros(size)
        left.append(weakref.ref(tensor))
        circle = [tensor]
        circle.append(circle)
        try:
            if size > 4:
                raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
        except RuntimeError as error:
            raise MemoryError from error

    assert find_batch_size(fn, device="cpu") == 4
    assert len(left) == 6


def test_all_processes_go_the_way_of_the_one_with_the_least():
    asked = []

    def agree(fitted):
        asked.append(fitted)
        return fitted and len(asked) != 4  # another process has no room for 8

    assert tried(9, agree=agree, limit=8) == (7, [1, 2, 4, 8, 6, 7])
    assert asked == [True] * 6


MEMORY = """
import resource, torch
from slurmgpu import find_batch_size
from slurmgpu.training import batch_size

left = batch_size.memory_left()
batch_size.memory_left = lambda: left  # others on this machine come and go
before = resource.getrlimit(resource.RLIMIT_DATA)
part = left // 8
print(find_batch_size(lambda size: torch.empty(size * part, dtype=torch.uint8), sizes=range(1, 40)))
print(resource.getrlimit(resource.RLIMIT_DATA) == before)

def step(size):
    return [torch.empty(size << 20, dtype=torch.uint8) for _ in range(3)]

batch_size.memory_left = lambda: None
mapped = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + (8 << 30), resource.RLIM_INFINITY))
found = find_batch_size(step)
step(found)
try:
    step(2 * found)
except RuntimeError as error:
    print(found, error)
"""


def test_a_real_shortage_is_found_and_memory_that_does_not_exist_is_not_promised(slurmgpu):
    of_memory_left, put_back, limited = slurmgpu.code(MEMORY).stdout.split("\n", 2)
    assert of_memory_left == "7"  # eighths, for a tenth stays free
    assert put_back == "True"
    found, said = limited.split(" ", 1)
    # 2,457 would leave a tenth of 8 GiB, and 2,560 is tried next. Nothing writes to the blocks, and what the C library
    # maps besides, 64 MiB for the heap of each thread, is small beside the 2 GiB that are left.
    assert found == "2048"
    assert "can't allocate memory" in said


class FakeGPU:
    """Of torch.cuda, what is asked about memory: a GPU with 100 bytes, of which others hold 20."""

    def __init__(self, monkeypatch, fraction=1.0):
        self.peak = 0
        answers = {
            "device": lambda device: contextlib.nullcontext(),
            "mem_get_info": lambda: (80, 100),
            "memory_reserved": lambda: 0,
            "max_memory_reserved": lambda: self.peak,
            "reset_peak_memory_stats": lambda: setattr(self, "peak", 0),
            "empty_cache": lambda: None,
            "get_per_process_memory_fraction": lambda: fraction,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        monkeypatch.setattr(batch_size, "random_state", lambda device: {})
        monkeypatch.setattr(batch_size, "set_random_state", lambda state, device: None)

    def step(self, size):
        if size > 80:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        self.peak = size


def test_a_margin_of_the_gpus_memory_stays_free(monkeypatch, caplog):
    gpu = FakeGPU(monkeypatch)
    assert find_batch_size(gpu.step, device="cuda", sizes=[64, 72, 76, 80, 81, 128]) == 72
    assert find_batch_size(gpu.step, device="cuda", sizes=[64, 72, 76, 80, 81, 128], margin=0) == 80
    assert not caplog.records
    assert find_batch_size(gpu.step, device="cuda", sizes=[76, 152]) == 76
    assert "A batch size of 76 leaves less than 10 % of the memory free." in caplog.text
    with pytest.raises(MemoryError, match=r"at the smallest, 90: CUDA out of memory\."):
        find_batch_size(gpu.step, device="cuda", sizes=[90, 152])


def test_a_margin_of_the_share_that_pytorch_may_take_stays_free(monkeypatch):
    gpu = FakeGPU(monkeypatch, fraction=0.5)
    assert find_batch_size(gpu.step, device="cuda", sizes=[40, 45, 46, 50, 72]) == 45
    monkeypatch.delattr(torch.cuda, "get_per_process_memory_fraction")  # as in PyTorch 2.5
    assert find_batch_size(gpu.step, device="cuda", sizes=[40, 45, 46, 50, 72]) == 72
