"""What a user's exception says is asked for in one way, which cannot fail."""

import ast
import asyncio
import errno
import os
from pathlib import Path

import pytest

from slurmgpu.errors import ItemError, Retry
from slurmgpu.run.failures import FILES, INPUT, ITEM, LOADING, blaming, class_of
from slurmgpu.util.exceptions import MOST_SAID, MOST_TRACED, described, message_of, trace_of
from slurmgpu.util.forks import is_of_limit
from slurmgpu.worker.assignment import WorkerFailedError
from slurmgpu.worker.call_failures import Failure
from tests.unit.test_computer import Recorder, compute, failures, raise_at

PACKAGE = Path(__file__).parents[2] / "slurmgpu"


class LacksCodeError(Exception):
    def __str__(self):
        return f"{self.code}"


class NoTextError(Exception):
    def __str__(self):
        return None


class ExitsError(Exception):
    def __str__(self):
        raise SystemExit(1)


class HiddenError(Exception):
    @property
    def __notes__(self):
        raise ValueError


MUTE = (LacksCodeError, NoTextError, ExitsError)


def raised(kind):
    try:
        raise kind
    except kind as error:
        return error


@pytest.mark.parametrize(("kind", "found"), [*zip(MUTE, ("AttributeError", "TypeError", "SystemExit"), strict=True)])
def test_an_exception_that_cannot_say_what_it_is_has_a_message_and_a_traceback(kind, found):
    error = raised(kind)
    assert message_of(error) == f"(no message: its __str__ raises {found})"
    assert described(error) == f"{kind.__name__}: {message_of(error)}"
    assert "in raised" in trace_of(error)


def test_a_message_that_quotes_megabytes_is_passed_on_by_its_ends(caplog):
    long = ValueError(f"cannot parse {'x' * 10**7} of 3")
    with pytest.raises(ValueError, match="cannot") as caught:
        raise long
    for text, most in ((described(long), MOST_SAID), (trace_of(caught.value), MOST_TRACED)):
        assert len(text) < most + 50
        assert "ValueError: cannot parse xxx" in text
        assert "characters …] x" in text
        assert text.rstrip().endswith("x of 3")
    computed = compute(Recorder(raise_at(2, 5, error=lambda text: ItemError(str(long)))))
    assert failures(computed).keys() == {2, 5}
    assert len(caplog.text) < 10**5


def test_an_exception_that_refuses_an_attribute_has_a_traceback():
    assert "in raised" in trace_of(raised(HiddenError))


def test_the_message_of_any_other_exception_is_its_own():
    assert message_of(KeyError("id")) == "'id'"
    assert described(ValueError("a\nb")) == "ValueError: a\nb"
    assert described(ValueError()) == "ValueError"


@pytest.mark.parametrize("kind", [*MUTE, BaseException, asyncio.CancelledError])
def test_an_item_whose_exception_is_unusual_costs_no_other_item_its_row(kind):
    found = failures(compute(Recorder(raise_at(3, error=kind)), batch_size=1))
    assert list(found) == [3]
    assert found[3].kind == "item_error"
    assert found[3].message.startswith(kind.__name__)
    assert "in function" in found[3].trace


def test_ctrl_c_is_no_error_of_an_item():
    with pytest.raises(KeyboardInterrupt):
        compute(Recorder(raise_at(3, error=KeyboardInterrupt)))


class MuteItemError(LacksCodeError, ItemError):
    way = {"used": "for something else"}


class MuteRetryError(LacksCodeError, Retry):
    def __init__(self, message):
        self.text = message  # without `Retry.__init__`


@pytest.mark.parametrize("is_returned", [False, True])
@pytest.mark.parametrize("kind", [MuteItemError, MuteRetryError])
def test_a_subclass_of_an_error_of_items_is_the_error_of_its_item(kind, is_returned):
    def returning(items):
        return [kind("x") if item.index == 3 else {"x": 0.0} for item in items]

    workload = Recorder(returning if is_returned else raise_at(3, error=kind))
    found = failures(compute(workload, batch_size=1))
    assert [(index, failure.kind) for index, failure in found.items()] == [(3, "item_error")]
    assert "no message" in found[3].message


class Unreadable:
    def __array__(self, *_args, **_kwargs):
        raise LacksCodeError


def test_a_value_that_raises_when_it_is_read_is_the_error_of_its_item():
    rows = compute(Recorder(lambda items: [{"x": Unreadable() if item.index == 3 else 0.0} for item in items])).rows
    assert [index for index, row in rows.items() if isinstance(row, Failure)] == [3]
    assert "LacksCodeError: (no message" in rows[3].message


def test_an_item_that_cannot_be_sorted_fails_alone_and_values_that_cannot_be_compared_are_the_workloads_fault():
    def key(item):
        if item.index == 3:
            raise LacksCodeError
        return -item.index

    workload = Recorder(sort_key=key)
    found = failures(compute(workload, batch_size=8))
    assert [(index, each.kind) for index, each in found.items()] == [(3, "item_error")]
    assert workload.batches == [[7, 6, 5, 4, 2, 1, 0]]
    with pytest.raises(WorkerFailedError, match="the values of sort_key cannot be compared: TypeError") as raised:
        compute(Recorder(sort_key=lambda item: None if item.index else ""))
    assert raised.value.kind == "workload_error"


@pytest.mark.parametrize("ended", [FILES, INPUT, LOADING, ITEM])
@pytest.mark.parametrize("kind", MUTE)
def test_every_exception_has_a_failure_class(kind, ended):
    assert class_of(raised(kind), ended) in ("crash", "input_error", "workload_error", "item_error")


def test_a_process_that_cannot_be_started_is_no_fault_of_the_file_system():
    text = os.strerror(errno.EAGAIN)
    for ended, of_process in ((FILES, "crash"), (INPUT, "input_error")):
        assert class_of(OSError(errno.EAGAIN, text), ended) == of_process  # as of fork(2)
        assert class_of(OSError(errno.EAGAIN, text, "shards/00001.h5"), ended) == "file_system"


def test_a_locked_file_and_a_full_pipe_are_no_limit_on_processes():
    read_end, end = os.pipe()
    os.set_blocking(end, False)
    with open(read_end, "rb"), pytest.raises(BlockingIOError) as full, open(end, "wb") as pipe:
        pipe.write(bytes(1 << 20))
    locked = BlockingIOError(errno.EAGAIN, "Unable to synchronously open file (unable to lock file, errno = 11)")
    for error in (full.value, locked):  # HDF5's error in h5py has no file name either
        assert not is_of_limit(error)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (RuntimeError("can't start new thread"), 1, "crash: gpu1: This machine starts no more processes"),
        (
            BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)),
            1,
            "crash: gpu1: This machine starts no more processes",
        ),
        (OSError(errno.ENOSPC, "No space left on device", "7.out"), 73, "disk_full: gpu1 has no room for a file: "),
    ],
)
def test_a_task_that_cannot_begin_says_why_in_a_sentence(caplog, error, code, said):
    with pytest.raises(SystemExit) as ended, blaming("gpu1"):
        raise error
    assert ended.value.code == code
    assert caplog.messages[0].startswith(said)


BROAD = {"Exception", "BaseException", "SystemExit"}


def _is_own_text(node, name):
    """Whether an expression asks the exception `name` for its text: str, repr, an f-string, or a line of the log."""
    if isinstance(node, ast.FormattedValue):
        return isinstance(node.value, ast.Name) and node.value.id == name
    if not isinstance(node, ast.Call) or not any(isinstance(each, ast.Name) and each.id == name for each in node.args):
        return False
    function = node.func
    is_logged = isinstance(function, ast.Attribute) and function.attr in ("debug", "info", "warning", "error")
    return is_logged or (isinstance(function, ast.Name) and function.id in ("str", "repr", "format"))


def _unsafe(source):
    """The lines where a handler of any exception takes its text without the functions of util/exceptions.py."""
    for handler in ast.walk(ast.parse(source)):
        if isinstance(handler, ast.ExceptHandler) and handler.name:
            kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
            if BROAD & {each.id for each in kinds if isinstance(each, ast.Name)}:
                yield from (node.lineno for node in ast.walk(handler) if _is_own_text(node, handler.name))


def test_a_handler_of_any_exception_asks_for_its_text_safely():
    assert [*_unsafe("try:\n    f()\nexcept Exception as e:\n    print(f'{e}')\n    log.info('%s', e)\n")] == [5, 4]
    found = {str(file): [*_unsafe(file.read_text())] for file in PACKAGE.rglob("*.py")}
    assert {file: lines for file, lines in found.items() if lines} == {}
