"""Rows of a shard: in batches, and narrowed down to items where a call fails."""

import copy
import errno
import gc
import json
import pickle
import re
import subprocess
import sys
from concurrent.futures.process import BrokenProcessPool
from dataclasses import FrozenInstanceError, dataclass, field, replace

import numpy as np
import pytest

from slurmgpu.errors import GPUFaultError, Interrupted, ItemError, NodeError, Retry, WorkerBrokenError, WorkloadError
from slurmgpu.loader.adapted import adapt
from slurmgpu.run.crash_history import History
from slurmgpu.run.failures import ITEM, LOADING, POLICIES, Policy, class_of
from slurmgpu.shards.columns import Array, Json
from slurmgpu.shards.shard_file import read_directory
from slurmgpu.util.broken_process import NO_FILES
from slurmgpu.worker.assignment import WorkerFailedError
from slurmgpu.worker.call_failures import Failure
from slurmgpu.worker.computed_shard import common_failure
from slurmgpu.worker.computer import LONGEST_PAUSE_S, Computer
from slurmgpu.worker.item_copies import own_copies
from slurmgpu.worker.unpublished import is_enough
from slurmgpu.workload import Item, Workload

COLUMNS = {"x": Array("float64")}


class OutOfMemoryError(RuntimeError):
    """Named as PyTorch names its own."""


class Recorder:
    """A workload made of a function; remembers the batches that it was called with."""

    def __init__(self, function=lambda items: [{"x": item.data["x"]} for item in items], **members):
        self.function = function
        self.batches = []
        self.__dict__.update(members)

    def __call__(self, items):
        self.batches.append([item.index for item in items])
        return self.function(items)


def compute(workload, n=8, batch_size=4, history=None, start=0, **given):
    items = [Item(start + i, {"x": float(i)}) for i in range(n)]
    given = {"columns": COLUMNS, "batch_size": batch_size, **given}
    computer = Computer(adapt(workload, "Recorder"), "Recorder", **given)
    try:
        return computer.compute(computer.take_in(items), history or History())
    finally:
        computer.close()


def failures(computed):
    return {index: row for index, row in computed.rows.items() if isinstance(row, Failure)}


def test_an_item_cannot_be_changed_and_can_be_copied_and_pickled():
    item = Item(3, {"x": [1.0]}, 7)
    for name in ("data", "text"):
        with pytest.raises(FrozenInstanceError, match=f"cannot assign to field '{name}'"):
            setattr(item, name, {})
    for copied in (copy.copy(item), copy.deepcopy(item), pickle.loads(pickle.dumps(item)), replace(item)):
        assert (copied, copied.seed) == (item, item.seed)


def test_the_fields_of_an_item_are_read_like_those_of_a_dictionary():
    item = Item(3, {"x": 1, "missing": None})
    assert (item["x"], item.get("x"), item.get("y"), item.get("y", 2)) == (1, 1, None, 2)
    assert "missing" in item
    assert "y" not in item
    with pytest.raises(KeyError, match="'y'"):
        item["y"]
    with pytest.raises(TypeError, match="not iterable"):
        list(item)


@dataclass(frozen=True)
class Named(Item):
    name: str = field(kw_only=True)


def test_an_item_of_a_class_of_users_is_copied_and_pickled_with_what_it_adds():
    item = Named(3, {"x": [1.0]}, 7, name="a")
    for copied in (copy.copy(item), copy.deepcopy(item), pickle.loads(pickle.dumps(item)), replace(item, name="a")):
        assert type(copied) is Named
        assert copied == item


def test_what_the_workload_notes_belongs_to_the_shard_that_is_computed():
    noted = {"while loading": 1}

    def function(items):
        if items[0].index < 8:
            noted["batch_tokens"] = 100 - items[0].index
        return [{"x": item.data["x"]} for item in items]

    workload, history = Recorder(function), History()
    computer = Computer(adapt(workload, "Recorder"), "Recorder", COLUMNS, 4, noted=noted)
    first, second = ([Item(start + i, {"x": float(i)}) for i in range(8)] for start in (0, 8))
    computed = computer.compute(computer.take_in(first), history)
    assert computer.compute(computer.take_in(second), history).notes() == {}
    assert computed.notes() == {"batch_tokens": 96}  # also while the next shard is computed


NOTING = """
from slurmgpu import Array

class Noting:
    columns = {"x": Array("float64")}
    batch_size = 4

    def load(self, task):
        self.task = task

    def __call__(self, items):
        if items[0].index == 4:
            self.task.note("batch_tokens", 512)
        return [{"x": 1.0} for _ in items]
"""


def test_notes_of_a_workload_are_kept_in_the_file_of_the_shard(project, slurmgpu):
    folder = project(16, workload="Noting")
    (folder / "workloads.py").write_text(NOTING)
    slurmgpu("submit", "--executor", "debug", "--gpus", "0", cwd=folder, expect=0)
    notes = [read_directory(folder / f"run/shards/{shard:05d}.h5").notes for shard in range(2)]
    assert notes == [{"batch_tokens": 512, "not_finite": {}}, {"not_finite": {}}]


def test_a_computed_batch_is_held_no_longer_unless_some_of_it_is_computed_again():
    sizes = []

    def function(items):
        sizes.append([len(batch) for batch in taken.batches])
        return [Retry("busy") if item.index == 5 and len(sizes) < 4 else {"x": item.data["x"]} for item in items]

    computer = Computer(adapt(Recorder(function), "Recorder"), "Recorder", COLUMNS, 4, retries=1, pause=Pauses())
    taken = computer.take_in([Item(i, {"x": float(i)}) for i in range(12)])
    assert not failures(computer.compute(taken, History()))
    assert sizes == [[4, 4, 4], [0, 4, 4], [0, 4, 4], [0, 4, 0]]


COLLECTING = """
import gc
from slurmgpu import Array

THRESHOLDS = {thresholds}

class Collecting:
    columns = {{"x": Array("float64")}}

    def load(self, task):
        before = gc.get_stats()
        self.kept = [[] for _ in range(300_000)]
        self.n = [now["collections"] - then["collections"] for now, then in zip(gc.get_stats(), before)]
        if THRESHOLDS:
            gc.set_threshold(*THRESHOLDS)

    def __call__(self, items):
        assert self.n[0] and self.n[2] == 0
        assert gc.get_threshold() == (THRESHOLDS or {default})
        return [{{"x": 1.0}} for _ in items]
"""


@pytest.mark.parametrize("thresholds", [None, (500, 5, 50)])
def test_a_workload_that_loads_is_not_held_up_by_full_collections_of_garbage(project, slurmgpu, thresholds):
    folder = project(16, workload="Collecting")
    (folder / "workloads.py").write_text(COLLECTING.format(thresholds=thresholds, default=gc.get_threshold()))
    slurmgpu("submit", "--executor", "debug", "--gpus", "0", cwd=folder, expect=0)


def raise_at(*bad, error=ValueError):
    def function(items):
        for item in items:
            if item.index in bad:
                raise error(f"cannot do {item.index}")
        return [{"x": item.data["x"]} for item in items]

    return function


def test_batches_are_cut_from_the_shard_in_order():
    workload = Recorder()
    computed = compute(workload, n=10)
    assert workload.batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [row["x"] for row in computed.rows.values()] == [float(i) for i in range(10)]
    assert computed.notes() == {}


def test_an_exception_is_narrowed_to_its_item_and_the_others_keep_their_rows():
    workload = Recorder(raise_at(5))
    computed = compute(workload)
    assert list(failures(computed)) == [5]
    line = workload.function.__code__.co_firstlineno + 3
    said = f"item_error: ValueError: cannot do 5 (test_computer.py, line {line})"
    assert str(failures(computed)[5].to_row()) == said
    assert computed.rows[6]["x"] == 6.0
    assert workload.batches == [[0, 1, 2, 3], [4, 5, 6, 7], [4, 5], [4], [5], [6, 7]]


def test_an_error_names_the_line_of_the_users_own_code_that_led_to_it(tmp_path):
    source = tmp_path / "own.py"
    source.write_text("import json\ndef call(items):\n    return json.loads('{')\n")
    own = {}
    exec(compile(source.read_text(), source, "exec"), own)
    [failure, *_] = failures(compute(own["call"], folder=str(tmp_path))).values()
    assert failure.message.startswith("JSONDecodeError: ")
    assert failure.message.endswith("(own.py, line 3)")
    [elsewhere, *_] = failures(compute(own["call"], folder="/nowhere")).values()
    assert "(decoder.py, line " in elsewhere.message


def test_sys_exit_in_a_workload_is_that_items_error():
    assert list(failures(compute(Recorder(raise_at(2, error=SystemExit))))) == [2]


def test_an_item_error_that_is_raised_or_returned_is_the_items_own():
    returned = Recorder(lambda items: [ItemError("no") if item.index == 1 else {"x": 0} for item in items])
    assert str(failures(compute(returned))[1].to_row()) == "item_error: no"
    assert str(failures(compute(Recorder(raise_at(1, error=ItemError))))[1].to_row()) == "item_error: cannot do 1"


def test_what_an_item_error_of_users_calls_a_failure_is_no_failure_class():
    class OwnError(ItemError):
        failure = ["blurred", "dark"]

    assert [failure.kind for failure in failures(compute(Recorder(raise_at(2, error=OwnError)))).values()] == [
        "item_error"
    ]


def test_out_of_memory_halves_the_batch_for_the_rest_of_the_shard(monkeypatch):
    def function(items):
        if len(items) > 3:
            raise OutOfMemoryError("CUDA out of memory")
        return [{"x": item.data["x"]} for item in items]

    freed = []
    monkeypatch.setattr("slurmgpu.worker.computer.free_memory", lambda: freed.append(len(workload.batches)))
    workload = Recorder(function)
    computed = compute(workload, n=16, batch_size=8)
    assert not failures(computed)
    assert computed.oom_batch == 2
    assert freed == [1, 2, 5]  # after each call that was too large, before the next
    sizes = [len(batch) for batch in workload.batches]
    assert sizes == [8, 4, 2, 2, 4, 2, 2, 2, 2, 2, 2]


def test_memory_that_suffices_for_larger_batches_later_makes_none_larger():
    def function(items):
        if len(items) > 2 or (len(items) == 2 and items[0].index < 4):
            raise OutOfMemoryError("CUDA out of memory")
        return [{"x": item.data["x"]} for item in items]

    workload = Recorder(function)
    computed = compute(workload, n=10, batch_size=8)
    assert (computed.oom_batch, workload.batches[-2:], failures(computed)) == (1, [[8], [9]], {})


@pytest.mark.parametrize("error", [MemoryError, lambda said: RuntimeError(f"can't allocate {said}: you tried to")])
def test_the_memory_of_the_host_is_not_that_of_the_gpu(error):
    def function(items):
        if len(items) > 2 or any(item.index == 3 for item in items):
            raise error("memory")
        return [{"x": item.data["x"]} for item in items]

    computed = compute(Recorder(function))
    assert computed.oom_batch == 1
    [(index, failure)] = failures(computed).items()
    assert (index, failure.kind) == (3, "host_oom")
    assert failure.message.startswith("out of host memory with a batch of 1: ")


def test_out_of_memory_at_a_batch_of_one_is_the_items_fault():
    computed = compute(Recorder(raise_at(3, error=OutOfMemoryError)))
    assert {index: str(failure.to_row()) for index, failure in failures(computed).items()} == {
        3: "cuda_oom: out of memory with a batch of 1: cannot do 3"
    }


def test_processes_that_agree_on_failures_call_the_workload_with_the_same_batches():
    # The leader's memory is short at batches of more than two; its peer has enough, and learns of it.
    leader = Recorder(
        lambda items: raise_at(*range(8), error=OutOfMemoryError)(items) if len(items) > 2 else [{"x": 0}] * 2
    )
    told = []
    compute(leader, agree=lambda failure: told.append(failure) or failure)
    peer = Recorder(lambda items: None)
    computed = compute(peer, agree=lambda failure: failure or told.pop(0), keeps_rows=False)
    assert peer.batches == leader.batches == [[0, 1, 2, 3], [0, 1], [2, 3], [4, 5], [6, 7]]
    assert computed.oom_batch == 2


class AcceleratorError(RuntimeError):
    """Named as PyTorch names an error of CUDA."""


@pytest.mark.parametrize(
    "error",
    [
        AcceleratorError(
            "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in https://docs.nvidia.com"
        ),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA driver error: out of memory"),
        RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
    ],
)
def test_memory_that_cuda_itself_or_its_libraries_lack_halves_the_batch_too(error):
    def function(items):
        if len(items) > 2:
            raise error
        return [{"x": item.data["x"]} for item in items]

    computed = compute(Recorder(function))
    assert (computed.oom_batch, failures(computed)) == (2, {})


@pytest.mark.parametrize(
    "error",
    [
        AcceleratorError("CUDA error: device-side assert triggered"),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("Triton Error [CUDA]: device-side assert triggered"),
        RuntimeError("CUDA driver error: device-side assert triggered"),
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"),
        RuntimeError("cusolver error: CUSOLVER_STATUS_NOT_INITIALIZED, when calling `cusolverDnCreate(handle)`"),
    ],
)
def test_a_lost_cuda_context_ends_the_worker(error):
    with pytest.raises(WorkerBrokenError, match=f"^{re.escape(f'{type(error).__name__}: {error}')}$"):
        compute(Recorder(raise_at(0, error=lambda text: error)))


class XlaRuntimeError(RuntimeError):
    """As JAX has it; CuPy's CUDARuntimeError is a RuntimeError as well."""


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        RuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered"),
        RuntimeError("CUDA_ERROR_MISALIGNED_ADDRESS: misaligned address"),
        XlaRuntimeError("INTERNAL: stream: CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure"),
        BrokenProcessPool("A child process terminated abruptly"),
    ],
)
def test_a_process_whose_cuda_context_or_pool_is_lost_ends(error):
    with pytest.raises(WorkerBrokenError, match=f"^{type(error).__name__}: ") as caught:
        compute(Recorder(raise_at(0, error=lambda text: error)))
    assert caught.value.blames_items


@pytest.mark.parametrize("place", [0, 5])
@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, "Too many open files", "/dev/null"),
        RuntimeError("can't start new thread"),
        RuntimeError("unable to open shared memory object </torch_1> in read-write mode: Too many open files (24)"),
    ],
)
def test_a_process_that_is_used_up_ends_and_what_let_its_own_go_is_halved(monkeypatch, error, place):
    """Items are blamed only where the process has computed none before."""
    monkeypatch.setattr("slurmgpu.worker.computer.is_used_up", lambda: True)
    with pytest.raises(WorkerBrokenError, match=f"^{type(error).__name__}: ") as caught:
        compute(Recorder(raise_at(place, error=lambda text: error)))
    assert caught.value.blames_items == (place == 0)
    monkeypatch.setattr("slurmgpu.worker.computer.is_used_up", lambda: False)
    assert list(failures(compute(Recorder(raise_at(place, error=lambda text: error))))) == [place]


USING_UP = """
import resource, sys, threading
from slurmgpu.util.broken_process import is_used_up
said = [is_used_up()]
kept, _ = [], resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
try:
    while True:
        kept.append(open("/dev/null"))
except OSError:
    said.append(is_used_up())
del kept[20:]
said.append(is_used_up())
def none(*arguments):
    raise RuntimeError("can't start new thread")
threading.Thread.start = none
print(said, is_used_up())
"""


def test_a_process_is_used_up_while_it_keeps_its_files_or_starts_no_thread():
    done = subprocess.run([sys.executable, "-c", USING_UP], capture_output=True, text=True)
    assert done.stdout == "[False, True, False] True\n", done.stderr


def test_what_quotes_an_error_of_cudas_or_says_something_like_it_is_an_items_error():
    said = "cannot parse 'RuntimeError: an illegal memory access was encountered'"
    for error in (ValueError(said), RuntimeError("misaligned address: no street"), ItemError(NO_FILES)):
        assert list(failures(compute(Recorder(raise_at(2, error=lambda text, error=error: error))))) == [2]


def test_a_failure_that_is_the_nodes_fault_ends_the_task_and_costs_no_item(monkeypatch):
    row = Policy("fans that stand still", True, node_at_fault=True, seen={ITEM: lambda error: "fan" in str(error)})
    monkeypatch.setitem(POLICIES, "fan_fault", row)
    failing = raise_at(3, error=lambda text: RuntimeError("CUDA error: a fan stands still"))
    with pytest.raises(WorkerFailedError, match=r"item 0: RuntimeError: CUDA error: a fan") as caught:
        compute(Recorder(failing))
    assert caught.value.kind == "fan_fault"


@pytest.mark.parametrize(
    "text",
    [
        "uncorrectable ECC error encountered",
        "uncorrectable NVLink error detected during the execution",
        "hardware stack error",
        "Invalid access of peer GPU memory over nvlink or a hardware error",
    ],
)
def test_an_error_of_the_gpus_hardware_is_the_nodes_fault_and_no_items(text):
    with pytest.raises(WorkerFailedError) as caught:
        compute(Recorder(raise_at(3, error=lambda _: AcceleratorError(f"CUDA error: {text}\nSearch for it"))))
    assert caught.value.kind == "gpu_fault"
    said = f"the texts speak of an {text}"
    assert list(failures(compute(Recorder(raise_at(3, error=lambda _: ValueError(said)))))) == [3]


@pytest.mark.parametrize(
    "text",
    [
        "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver",
        "No CUDA GPUs are available",
        "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling "
        "NumCudaDevices() that might have already set an error? Error 802: system not yet initialized",
        "CUDA error: uncorrectable ECC error encountered",
    ],
)
def test_what_pytorch_says_of_a_driver_or_a_gpu_in_loading_is_a_fault_of_the_gpu(text):
    assert class_of(RuntimeError(text), LOADING) == "gpu_fault"


@pytest.mark.parametrize(
    ("error", "kind"), [(NodeError, "node_fail"), (GPUFaultError, "gpu_fault"), (WorkloadError, "workload_error")]
)
def test_what_a_workload_blames_its_node_or_itself_for_costs_no_item(error, kind):
    with pytest.raises(WorkerFailedError) as raised:
        compute(Recorder(raise_at(5, error=error)))
    assert (raised.value.kind, str(raised.value)) == (kind, "item 4: cannot do 5")


def test_a_sort_key_ends_task_or_process_as_a_call_does(monkeypatch):
    def sorting(error):
        return Recorder(sort_key=lambda item: len(raise_at(5, error=error)([item])))

    with pytest.raises(WorkerFailedError, match="item 5: cannot do 5") as raised:
        compute(sorting(NodeError))
    assert raised.value.kind == "node_fail"
    assert [failure.kind for failure in failures(compute(sorting(Interrupted))).values()] == ["item_error"]
    monkeypatch.setattr("slurmgpu.worker.computer.is_used_up", lambda: True)
    with pytest.raises(WorkerBrokenError):
        compute(sorting(lambda text: OSError(errno.EMFILE, text)))


def test_an_item_without_a_sort_key_fails_alone_and_says_why():
    workload = Recorder(sort_key=lambda item: -len(raise_at(5)([item])) * item.index)
    [(index, failure)] = failures(compute(workload)).items()
    assert (index, failure.message.partition(" (")[0]) == (5, "ValueError: cannot do 5")
    assert workload.batches == [[7, 6, 4, 3], [2, 1, 0]]


def test_a_full_disk_is_the_items_fault_where_no_progress_is_kept():
    computed = compute(Recorder(raise_at(2, error=lambda text: OSError(errno.ENOSPC, text))))
    assert [(index, failure.kind) for index, failure in failures(computed).items()] == [(2, "item_error")]
    keeping = Recorder(raise_at(2, error=lambda text: OSError(errno.ENOSPC, text)), resumes=True)
    with pytest.raises(WorkerFailedError) as raised:
        compute(keeping)
    assert raised.value.kind == "disk_full"


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"y": 1.0}], "column 'x' is missing"),
        ([{"x": 1.0, "z": 2}], "column 'z' is not declared"),
        ([{"x": [1.0, 2.0]}], r"column 'x': found shape \(2,\), expected \(\)"),
        ([{"x": "text"}], "column 'x'"),
        ([3], "a row is a mapping"),
    ],
)
def test_a_wrong_row_names_workload_and_column(rows, said):
    computed = compute(Recorder(lambda items: rows), n=1)
    message = failures(computed)[0].message
    assert message.startswith("workload Recorder: ")
    assert re.search(said, message)


def test_a_workload_explains_a_row_as_it_returned_it_without_kept_fields():
    workload = Recorder(lambda items: [{"x": 1.0, "z": 2}])
    workload.explain_misfit = lambda row: f"it has {', '.join(row)}"
    computed = compute(workload, n=1, columns={**COLUMNS, "given": Json()}, kept={"given": "x"})
    assert failures(computed)[0].message.endswith("column 'z' is not declared. Known: given, x. it has x, z")


def test_a_wrong_number_of_rows_fails_the_whole_batch_and_hides_in_no_smaller_one():
    workload = Recorder(lambda items: [{"x": 1.0}])
    computed = compute(workload, n=8)
    assert workload.batches == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert common_failure([computed]).message == "workload Recorder returned 1 row for 4 items"


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ({"x": [1.0] * 4}, "a dict"),
        (dict.fromkeys("abcd", 1.0), "a dict"),  # as many keys as there are items
        ("text", "a str"),
        (None, "None"),
        (4.0, "a float"),
    ],
)
def test_what_is_no_list_of_rows_is_called_what_it_is(returned, said):
    workload = Recorder(lambda items: returned)
    computed = compute(workload)
    assert workload.batches == [[0, 1, 2, 3], [4, 5, 6, 7]]
    expected = "expected a list with a row, or an ItemError, for each of them"
    assert common_failure([computed]).message == f"workload Recorder returned {said} for 4 items; {expected}"
    assert common_failure([compute(Recorder(lambda items: ({"x": 1.0} for _ in items)))]) is None


def test_items_that_cannot_be_read_are_input_errors_in_their_place():
    computer = Computer(adapt(Recorder(), "w"), "w", COLUMNS, 4)
    items = [Item(0, {"x": 1.0}), (1, ItemError("line 2: not JSON")), Item(2, {"x": 3.0})]
    computed = computer.compute(computer.take_in(items), History())
    assert list(computed.rows) == [0, 1, 2]
    assert str(computed.rows[1].to_row()) == "input_error: line 2: not JSON"
    assert computed.rows[2]["x"] == 3.0


@pytest.mark.parametrize("are_rows", [True, False])
def test_items_with_an_error_fail_only_where_they_are_rows_of_an_earlier_run(are_rows):
    computer = Computer(adapt(Recorder(), "w"), "w", COLUMNS, 4, items_are_rows=are_rows)
    items = [Item(0, {"x": 1.0, "error": "too dark"}), Item(1, {"x": 2.0, "error": ""})]
    computed = computer.compute(computer.take_in(items), History())
    assert failures(computed).keys() == ({0} if are_rows else set())


@pytest.mark.parametrize(
    ("function", "lines"),
    [
        (None, []),
        (lambda items: [ItemError("dark") if item.index == 1 else {"x": 0} for item in items], ["1: item_error: dark"]),
        (lambda items: [Retry("busy") if item.index == 1 else {"x": 0} for item in items], ["1: item_error: busy"]),
        (lambda items: raise_at(1)(items), ["1: item_error: ValueError: cannot do 1 (test_computer.py, line "]),
        (lambda items: [{"x": 0}], ["0: item_error: workload Recorder returned 1 row for 2 items"]),
    ],
    ids=["none", "returned", "for now", "raised", "too few"],
)
def test_each_failed_item_has_a_line_in_the_log(caplog, function, lines):
    computer = Computer(adapt(Recorder(function) if function else Recorder(), "w"), "Recorder", COLUMNS, 2)
    items = [Item(0, {"x": 1.0}), Item(1, {"x": 2.0}), (2, ItemError("line 3: not JSON")), Item(3, {"x": 1.0})]
    history = History(batch_weights={3: 1.0}, quarantined={3: "crash: the worker died by SIGSEGV"})
    computer.compute(computer.take_in(items), history)
    lines = [*lines, "2: input_error: line 3: not JSON", "3: crash: the worker died by SIGSEGV"]
    found = sorted(message for message in caplog.messages if message.startswith("item "))
    assert [message[5 : 5 + len(line)] for message, line in zip(found, lines, strict=True)] == lines


class Busy:
    """A function of items that fails the first `n_times` for each of the `bad` items, as `fail(item)` does."""

    def __init__(self, bad, n_times, fail):
        self.left = dict.fromkeys(bad, n_times)
        self.fail = fail
        self.seeds = {}

    def __call__(self, items):
        return [self._row(item) for item in items]

    def _row(self, item):
        assert self.seeds.setdefault(item.index, item.seed) == item.seed
        if self.left.get(item.index, 0):
            self.left[item.index] -= 1
            return self.fail(item)
        return {"x": item.data["x"]}


def throw(item):
    raise ConnectionError("refused")


class Pauses(list):
    """Keeps each pause in place of waiting."""

    def __call__(self, seconds, n_items):
        self.append((seconds, n_items))
        return True


def test_what_may_pass_is_tried_again_at_the_end_of_the_shard_and_leaves_no_trace():
    afters = iter((None, 5, None, 0.5))
    workload, pauses = Recorder(Busy([1, 2], 2, lambda item: Retry("HTTP 429", after=next(afters)))), Pauses()
    computed = compute(workload, retries=3, pause=pauses)
    assert workload.batches == [[0, 1, 2, 3], [4, 5, 6, 7], [1, 2], [1, 2]]
    assert pauses == [(5.0, 2), (0.5, 2)]
    assert computed == compute(Recorder())


def test_a_batch_that_raises_what_may_pass_is_tried_again_as_it_is_and_halved_in_the_last_try_only():
    workload, pauses = Recorder(Busy([5], 99, throw)), Pauses()
    computed = compute(workload, retries=2, pause=pauses)
    whole = [4, 5, 6, 7]
    assert workload.batches == [[0, 1, 2, 3], whole, whole, whole, [4, 5], [4], [5], [6, 7]]
    assert pauses == [(2.0, 4), (8.0, 4)]
    assert list(failures(computed)) == [5]
    assert failures(computed)[5].message.startswith("ConnectionError: refused (test_computer.py, line ")


def test_an_error_that_will_not_pass_is_not_tried_again_beside_one_that_may():
    workload = Recorder(Busy([1, 2], 99, lambda item: Retry("busy") if item.index == 1 else ItemError("blurred")))
    assert failures(compute(workload, retries=1, pause=Pauses())).keys() == {1, 2}
    assert workload.batches == [[0, 1, 2, 3], [4, 5, 6, 7], [1]]


def test_a_call_that_raises_what_will_not_pass_is_narrowed_at_once():
    workload, pauses = Recorder(raise_at(5)), Pauses()
    assert failures(compute(workload, retries=2, pause=pauses)).keys() == {5}
    assert (workload.batches, pauses) == ([[0, 1, 2, 3], [4, 5, 6, 7], [4, 5], [4], [5], [6, 7]], [])


def test_what_failed_in_its_last_try_is_not_said_to_be_put_off(caplog):
    computed = compute(Recorder(Busy([1], 99, lambda item: Retry("busy"))))
    assert (failures(computed).keys(), "put off" in caplog.text) == ({1}, False)


def test_a_call_that_raises_asks_for_its_pause_as_an_item_does():
    fails, pauses = [True], Pauses()

    def function(items):
        if fails and fails.pop():
            raise Retry("HTTP 429", after=5)
        return [{"x": item.data["x"]} for item in items]

    assert failures(compute(Recorder(function), retries=1, pause=pauses)) == {}
    assert pauses == [(5.0, 4)]


def test_a_timeout_of_asyncio_may_pass_where_it_is_another_class_than_pythons():
    of_python_3_10 = type("TimeoutError", (Exception,), {"__module__": "asyncio.exceptions"})

    def throw(item):
        raise of_python_3_10

    assert failures(compute(Recorder(Busy([5], 1, throw)), retries=1, pause=Pauses())) == {}
    returned = compute(Recorder(Busy([5], 1, lambda item: of_python_3_10())), retries=1, pause=Pauses())
    assert failures(returned) == {}


def test_the_last_try_of_an_item_says_why_it_failed_and_nothing_of_how_often():
    def fail(item):
        return Retry(f"HTTP {500 + item.index}", after=86_400)

    pauses = Pauses()
    computed = compute(Recorder(Busy([1], 99, fail)), retries=1, pause=pauses)
    assert pauses == [(LONGEST_PAUSE_S, 1)]
    never = compute(Recorder(Busy([1], 99, fail)))
    assert str(failures(computed)[1].to_row()) == str(failures(never)[1].to_row()) == "item_error: HTTP 501"
    assert common_failure([compute(Recorder(Busy(range(8), 99, fail)), retries=2, pause=pauses)]) is None
    alike = compute(Recorder(Busy(range(8), 99, lambda item: Retry("no route"))), retries=1, pause=pauses)
    assert common_failure([alike]).message == "no route"


def test_a_kept_field_is_as_it_was_before_the_workload_changed_its_item():
    workload = Recorder(lambda items: [{"x": item.data.pop("x")} for item in items])
    computed = compute(workload, columns={**COLUMNS, "given": Json()}, kept={"given": "x"})
    assert [row["given"] for row in computed.rows.values()] == [b"%d.0" % i for i in range(8)]


def test_an_item_without_a_field_that_its_row_keeps_fails_alone_and_is_not_computed():
    workload = Recorder(lambda items: [{} for _ in items])
    computer = Computer(adapt(workload, "Recorder"), "Recorder", {"given": Json()}, 4, kept={"given": "x"})
    computed = computer.compute(computer.take_in([Item(0, {"x": 1.0}), Item(1, {"y": 1.0})]), History())
    assert workload.batches == [[0]]
    assert str(failures(computed)[1].to_row()).startswith("item_error: no field 'x', which the row keeps.")


def test_a_failed_item_keeps_the_fields_that_their_columns_can_hold():
    columns = {"given": Json(), "n": Json()}
    workload = Recorder(raise_at(0))
    computer = Computer(adapt(workload, "Recorder"), "Recorder", columns, 4, kept={"given": "x", "n": "y"})
    computed = computer.compute(computer.take_in([Item(0, {"x": 1.0, "y": 10**5000})]), History())
    assert (list(computed.rows), computed.kept) == ([0], {0: {"given": b"1.0"}})


@pytest.mark.parametrize("error", [TimeoutError("busy"), OutOfMemoryError("CUDA out of memory")])
def test_items_are_called_again_as_they_were_before_the_workload_changed_them(error):
    fails = [True]

    def function(items):
        for item in items:
            item.data["x"] += 100
        if fails and fails.pop():
            raise error
        return [{"x": item.data["x"]} for item in items]

    computed = compute(Recorder(function), retries=1, pause=Pauses())
    assert [float(row["x"]) for row in computed.rows.values()] == [100.0 + i for i in range(8)]


def changed(data):
    data["messages"].append({"role": "user"})
    data["messages"][0]["role"] += "!"
    data["image"] /= 2
    return {"x": len(data["messages"]) + float(data["image"].sum()), "said": data["messages"]}


def test_what_a_workload_changes_inside_of_an_item_is_as_it_was_in_its_next_call_and_in_what_is_kept():
    """As where a chat's next turn is appended, or an image is scaled in place, and the batch is halved."""

    def function(items):
        rows = [changed(item.data) for item in items]
        if len(items) > 1:
            raise ValueError("too many")
        return rows

    data = {"messages": [{"role": "system"}], "image": np.ones(4)}
    given = [Item(index, {**data, "file": sys.stdout}) for index in range(4)]
    said = {"said": Json(), "given": Json()}
    workload = adapt(Recorder(function), "Recorder")
    computer = Computer(workload, "Recorder", {**COLUMNS, **said}, 4, kept={"given": "messages"})
    rows = computer.compute(computer.take_in(given), History()).rows.values()
    assert [float(row["x"]) for row in rows] == [4.0] * 4
    assert {row["said"] for row in rows} == {b'[{"role":"system!"},{"role":"user"}]'}
    assert {row["given"] for row in rows} == {b'[{"role":"system"}]'}


def test_an_item_that_is_nested_beyond_what_python_calls_is_given_as_it_is():
    data = {"text": "a", "deep": []}
    for _ in range(2 * sys.getrecursionlimit()):
        data["deep"] = [data["deep"]]
    assert own_copies([Item(0, data)])[0].data["text"] == "a"


def test_no_pause_is_longer_than_the_longest():
    pauses = Pauses()
    compute(Recorder(Busy([1], 99, lambda item: Retry("HTTP 429"))), retries=10, pause=pauses)
    assert [seconds for seconds, _ in pauses] == [2, 8, 32, 128, *[LONGEST_PAUSE_S] * 6]


def test_a_shard_is_left_if_the_task_ends_before_the_next_try():
    with pytest.raises(Interrupted):
        compute(Recorder(Busy([1], 1, throw)), retries=1, pause=lambda seconds, n_items: False)


def test_processes_try_the_same_items_again():
    told = []

    def keep(value):
        told.append(json.loads(json.dumps(value)))
        return told[-1]

    leader = Recorder(Busy([1, 2], 1, lambda item: Retry("busy")))
    compute(leader, retries=3, pause=Pauses(), share=keep)
    peer = Recorder(lambda items: None)
    own = Pauses()
    compute(peer, retries=3, share=lambda value: told.pop(0), keeps_rows=False, pause=own)
    assert own == []  # it waits for the leader, which has waited
    assert peer.batches == leader.batches == [[0, 1, 2, 3], [4, 5, 6, 7], [1, 2]]
    assert told == []


def test_items_with_the_same_sort_key_stay_in_order_whatever_it_is():
    for value in (None, {}, 1j):
        workload = Recorder(sort_key=lambda item, value=value: value)
        compute(workload)
        assert workload.batches == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_sort_key_orders_the_batches_and_not_the_rows():
    workload = Recorder(sort_key=lambda item: -item.index)
    computed = compute(workload)
    assert workload.batches == [[7, 6, 5, 4], [3, 2, 1, 0]]
    assert list(computed.rows) == list(range(8))


def test_a_quarantined_item_whose_failure_class_is_unknown_fails_like_any_other_item():
    """A history may be damaged, or a later slurmgpu's: a record with an unknown class is left out of every report."""
    computed = compute(Recorder(), history=History(quarantined={0: "melted: the card is gone"}))
    assert str(computed.rows[0].to_row()) == "item_error: melted: the card is gone"


def test_an_isolated_batch_is_computed_item_by_item_without_the_quarantined():
    workload = Recorder()
    calls = []
    history = History(batch_weights={4: 1.0}, quarantined={6: "crash: the worker died by SIGSEGV"})
    computed = compute(workload, history=history, on_batch=lambda *call: calls.append(call))
    assert workload.batches == [[0, 1, 2, 3], [4], [5], [7]]
    assert calls == [([0, 1, 2, 3], False, None), ([4], True, None), ([5], True, None), ([7], True, None)]
    assert str(computed.rows[6].to_row()) == "crash: the worker died by SIGSEGV"
    assert computed.notes() == {"isolated_batches": 1}


def test_an_isolated_item_is_isolated_when_it_is_tried_again():
    calls = []
    history = History(batch_weights={4: 1.0}, quarantined={})
    busy = Recorder(Busy([4], 1, lambda item: Retry("busy")))
    compute(busy, history=history, retries=1, pause=Pauses(), on_batch=lambda *call: calls.append(call))
    assert calls[-1] == ([4], True, None)


def test_a_common_way_of_failing_is_found_only_when_every_item_raised_at_one_place():
    assert common_failure([compute(Recorder(raise_at(*range(8))))]).message.startswith("ValueError: cannot do 0")
    assert common_failure([compute(Recorder(raise_at(*range(7))))]) is None
    assert common_failure([compute(Recorder(lambda items: [ItemError("no")] * len(items)))]) is None
    one, other = (compute(Recorder(raise_at(0, error=error)), n=1) for error in (ValueError, KeyError))
    assert common_failure([one, one]).message.startswith("ValueError: cannot do 0")
    assert common_failure([one, other]) is None
    assert common_failure([]) is None


def in_doubt(workload):
    return compute(workload, n=32, batch_size=16, doubts=lambda: True, is_enough=lambda n_failed: n_failed >= 8)


def test_of_a_shard_whose_calls_all_fail_alike_enough_items_are_computed_alone():
    workload = Recorder(raise_at(*range(32)))
    computed = in_doubt(workload)
    assert [len(batch) for batch in workload.batches] == [16, *[1] * 8]
    assert computed.is_sample
    assert {index for [index] in workload.batches[1:]} == failures(computed).keys() == computed.rows.keys()
    assert common_failure([computed]).message.startswith("ValueError: cannot do")


def test_a_call_whose_items_all_fail_alone_is_followed_by_none_without_items():
    workload = Recorder(raise_at(*range(8)))
    computed = compute(workload, doubts=lambda: True)
    assert sorted(len(batch) for batch in workload.batches) == [*[1] * 8, 4, 4]
    assert common_failure([computed]) is not None


def test_no_doubt_keeps_a_batch_that_needs_too_much_memory_from_being_halved():
    def function(items):
        if len(items) > 4:
            raise OutOfMemoryError("CUDA out of memory")
        return [{"x": item.data["x"]} for item in items]

    workload = Recorder(function)
    assert in_doubt(workload).oom_batch == 4
    assert [len(batch) for batch in workload.batches][:4] == [16, 8, 4, 4]


def test_items_that_a_workload_refuses_raise_no_doubt():
    workload = Recorder(raise_at(*range(32), error=ItemError))
    computed = in_doubt(workload)
    assert (len(failures(computed)), computed.is_sample) == (32, False)
    assert [len(batch) for batch in workload.batches][:3] == [16, 8, 4]


def test_items_that_are_computed_in_doubt_keep_their_rows():
    workload = Recorder(raise_at(*(index for index in range(16) if index != 5)))
    computed = compute(workload, n=16, batch_size=16, doubts=lambda: True)
    assert failures(computed).keys() == {*range(16)} - {5}
    assert not computed.is_sample
    alone = [batch[0] for batch in workload.batches if len(batch) == 1]
    assert sorted(alone) == [*range(16)]
    n_before = alone.index(5)
    rest = sorted(set(range(16)) - {*alone[: n_before + 1]})
    assert workload.batches[: n_before + 2] == [[*range(16)], *([index] for index in alone[: n_before + 1])]
    half = (len(rest) + 1) // 2
    assert [rest[:half]] == workload.batches[n_before + 2 : n_before + 3] or not rest


def test_calls_that_all_fail_alike_are_told_once_until_one_does_not(caplog):
    told = []
    workload = Recorder(raise_at(*(index for index in range(16) if index != 5)))
    compute(workload, n=16, batch_size=16, doubts=lambda: True, tell=told.append)
    assert told == ["each call failed so far: " + told[0].partition(": ")[2], ""]
    assert "ValueError: cannot do" in told[0]
    [logged] = [record.message for record in caplog.records if "computing each alone" in record.message]
    assert logged.startswith("items 0..15: ValueError: cannot do")


def failing_alike(index):
    error = ItemError(f"the program fails for {index}")
    error.way = ("program",)
    return error


def test_errors_in_place_of_rows_that_are_all_alike_are_told_until_there_is_a_row():
    told = []
    workload = Recorder(lambda items: [{"x": 0} if item.index == 6 else failing_alike(item.index) for item in items])
    compute(workload, n=16, batch_size=4, doubts=lambda: True, tell=told.append)
    assert told == ["each call failed so far: the program fails for 0", ""]


def test_what_is_tried_again_is_not_told_as_failing():
    told = []
    busy = Recorder(Busy(range(8), 1, lambda item: Retry("busy")))
    compute(busy, doubts=lambda: True, retries=1, pause=Pauses(), tell=told.append)
    assert told == [""] * len(told)


def test_items_that_fail_in_several_ways_raise_no_doubt_about_all():
    ways = {0: ValueError, 1: KeyError}

    def function(items):
        raise ways[items[0].index % 2](items[0].index)

    computed = in_doubt(Recorder(function))
    assert failures(computed).keys() == {*range(32)}


def test_ways_to_fail_are_kept_only_until_a_call_has_not_failed():
    def function(items):
        if items[0].index:
            raise Retry(f"the server refuses {items[0].index}")  # each such text is a way of its own
        return [{"x": 0.0}]

    computer = Computer(adapt(Recorder(function), "Recorder"), "Recorder", columns=COLUMNS, batch_size=1)
    computer.compute(computer.take_in([Item(index, {}) for index in range(9)]), History())
    assert not computer._first_calls._ways


@pytest.mark.parametrize(
    ("n_items", "seconds", "expected"),
    [(7, 1e9, False), (8, 59.0, False), (8, 60.0, True), (99, 0.0, False), (100, 0.0, True)],
)
def test_many_items_that_failed_alike_are_enough_and_few_where_that_took_long(n_items, seconds, expected):
    assert is_enough(n_items, seconds) is expected


def test_an_items_seed_depends_on_the_runs_seed_and_its_index_alone():
    seeds = {Item(index, {}, run_seed).seed for index in range(1000) for run_seed in (0, 1)}
    assert len(seeds) == 2000
    assert Item(5, {"a": 1}, 7).seed == Item(5, {}, 7).seed
    assert Item(0, {}, 0).seed == 3560153452049741418  # a promise: seeds are the same in every version


def test_a_class_derived_from_the_protocol_sets_its_columns_and_batch_size():
    class Derived(Workload):
        def __init__(self):
            self.columns, self.batch_size = COLUMNS, 2

        def __call__(self, items, /):
            return []

    assert adapt(Derived(), "Derived").batch_size == 2
