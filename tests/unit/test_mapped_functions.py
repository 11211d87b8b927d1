"""What `slurmgpu.map` makes of a function, of items and of types before anything runs."""

import dataclasses
import functools
import importlib
import json
import linecache
import os
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Annotated, Any, NamedTuple, TypedDict

import numpy as np
import pytest

from slurmgpu import Array, Item, Json, Ragged, SlurmGPUError, TaskContext, Text
from slurmgpu.code import functions, pickling, snapshots, value_digest
from slurmgpu.code.snapshots import Snapshot
from slurmgpu.code.value_digest import digest_of
from slurmgpu.inputs.lines import Jsonl
from slurmgpu.inputs.python_items import UNWRAP, is_table, write_values
from slurmgpu.mapping.annotations import annotated_types
from slurmgpu.run.submissions import Pickled
from slurmgpu.shards.column_types import columns_of, type_for_both, type_of, type_of_column, types_of_rows
from slurmgpu.workloads.function.workload import Function, as_row


class Point(NamedTuple):
    x: int
    y: int


LARGE = np.zeros(2_000_000)
LOCK = threading.Lock()


def reads_large(item):
    return float(LARGE[item])


def by_value(function):
    """The function as that of a notebook: it has no module that tasks could import."""
    function.__module__ = "__main__"
    return function


def test_a_function_of_a_module_goes_by_name_and_others_by_value():
    assert pickling.name_of(reads_large) == f"{__name__}:reads_large"
    assert pickling.name_of(json.dumps) == "json:dumps"
    assert pickling.name_of(np.linalg.norm) is not None
    assert functions.import_named(pickling.name_of(np.linalg.norm)) is np.linalg.norm
    others = [lambda item: item, by_value(lambda item: item), functools.partial(reads_large, 1), "text".upper]
    assert [pickling.name_of(other) for other in others] == [None] * 4


OPTIONS = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--k", type=int, default=1)
{how}

def scaled(text):
    return len(text) * args.k
"""


@pytest.mark.parametrize("given", [["--k", "3"], []])
@pytest.mark.parametrize("how", ["args = parser.parse_args()", "args, _ = parser.parse_known_args()"])
def test_a_module_that_parses_the_command_line_finds_that_of_the_script_in_tasks(tmp_path, monkeypatch, how, given):
    (tmp_path / "options_of_a_lab.py").write_text(OPTIONS.format(how=how))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["train.py", *given])
    monkeypatch.setattr(functions, "own_modules", lambda names: [*{"options_of_a_lab"} & names])
    assert functions.arguments_read() is None
    import options_of_a_lab

    argv = functions.arguments_read()
    assert argv == ["train.py", *given]
    packed = {"function": by_value(lambda text: options_of_a_lab.scaled(text)), "load": None}
    functions.pack(packed, tmp_path, argv)
    del sys.modules["options_of_a_lab"]  # as in a worker
    monkeypatch.setattr(sys, "argv", ["main.py", "runs/scaled", "{}"])
    function = Function(function="options_of_a_lab:scaled", columns={"result": "int32"}, items="value", argv=argv)
    function.load(TaskContext("cpu", 0, tmp_path))
    del sys.modules["options_of_a_lab"]
    assert function([Item(0, {"value": "ab"})]) == [{"result": 6 if given else 2}]


def test_a_command_line_of_jupyter_is_not_handed_on(monkeypatch):
    monkeypatch.setattr(functions, "own_modules", lambda names: [__name__])
    for argv, kept in (
        (["a.py", "-f"], ["a.py", "-f"]),
        (["/x/ipykernel_launcher.py", "-f"], None),
        ([""], [""]),
        ([], None),
    ):
        monkeypatch.setattr(sys, "argv", argv)
        assert functions.arguments_read() == kept


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--api-key", "abc123"], "a secret after --api-key"),
        (["--hf-token", "abc123"], "a secret after --hf-token"),
        (["--key=hf_0123456789abcdefghij"], "like a secret. Pass"),
    ],
)
def test_a_secret_on_a_command_line_that_tasks_need_is_refused(monkeypatch, arguments, said):
    monkeypatch.setattr(functions, "own_modules", lambda names: [__name__])
    monkeypatch.setattr(sys, "argv", ["a.py", *arguments])
    with pytest.raises(SlurmGPUError, match=rf"{said}") as caught:
        functions.arguments_read()
    assert arguments[-1] not in str(caught.value)


def test_numbers_and_names_of_tokens_on_a_command_line_are_no_secrets(monkeypatch):
    argv = ["a.py", "--max-tokens", "100", "--pad-token", "<pad>", "--max_new_tokens", "9", "--mask-token", "[MASK]"]
    monkeypatch.setattr(functions, "own_modules", lambda names: [__name__])
    monkeypatch.setattr(sys, "argv", argv)
    assert functions.arguments_read() == argv


def test_a_pickle_calls_the_function_with_what_it_captured(tmp_path):
    scale, table = 3, {"a": 1}
    packed = functions.pack({"function": by_value(lambda item: item * scale + table["a"]), "load": None}, tmp_path)
    (tmp_path / functions.PICKLE).write_bytes(packed.content)
    found = functions.unpack(tmp_path / functions.PICKLE, packed.record)
    assert found["function"](2) == 7
    assert "item * scale" in packed.source


def test_modules_of_the_users_that_a_function_needs_are_named(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("import deeper\nfactor = 2\n")
    (tmp_path / "deeper.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    import mine

    def function(item):
        import late

        return late.f(item) * mine.factor

    packed = functions.pack({"function": by_value(function), "load": None}, tmp_path)
    assert {"mine", "deeper", "late"} <= {*packed.modules}


OF_A_PACKAGE = """
def helper(item):
    from . import beside
    from ..above import f as g
    return beside.f(g(item))

class Calls:
    def other(self, item):
        import in_method
        return in_method.f(item)

    def __call__(self, item):
        return helper(self.other(item))
"""


def test_a_module_that_a_text_in_a_function_names_is_one_that_it_needs(tmp_path):
    (tmp_path / "nets_of_text").mkdir()
    (tmp_path / "nets_of_text" / "deep.py").touch()
    (tmp_path / "train.py").touch()

    def function(item):
        return importlib.import_module("nets_of_text.deep"), "train.loss", "os.path"

    assert "nets_of_text.deep" in functions.pack({"function": by_value(function), "load": None}, tmp_path).modules
    assert not {"train.loss", "os.path"} & {*functions.pack({"function": function, "load": None}, tmp_path).modules}


def test_modules_are_named_that_helpers_and_methods_import_when_they_are_called(tmp_path):
    names = {"__name__": "__main__", "__package__": "outer.inner"}
    exec(OF_A_PACKAGE, names)
    packed = functions.pack({"function": names["Calls"](), "load": None}, tmp_path)
    assert {"in_method", "outer.inner.beside", "outer.above"} <= {*packed.modules}


SCRIPT = """
import dataclasses, enum, functools, pathlib, sys, typing
from slurmgpu.code.value_digest import digest_of

T = typing.TypeVar("T")
STOP = {"alpha", "beta", "gamma", "delta"}
WITHIN = {"words": [{"eins", "zwei", "drei"}, {("a", 1), ("b", 2)}], "paths": {*map(pathlib.Path, "xyz")}}
MIXED = {("a", 1), None, b"c", frozenset({"x", "y", "z"})}

class Box(typing.Generic[T]):
    def __init__(self, value: T) -> None:
        self.values = {value, self}  # a set that is in a value of its own

@dataclasses.dataclass
class Row:
    n: int

class Kind(enum.Enum):
    ONE = 1
    TWO = 2

class Bag(typing.Generic[T]):
    def __init__(self, kinds: set[T]) -> None:
        self.kinds, self.bag = kinds, {"u", "v", "w"}

    def has(self, kind: T) -> bool:
        return kind in self.kinds

class Words(set):
    pass

BAG = Bag({Kind.ONE, Kind.TWO})
BAG.words = Words(["first", "second", "third"])

@functools.cache
def cached(item):
    return item in {"one", "two", "three", "four"} or cached("one")

BOX = Box("red")

def function(item, greens=frozenset(["lime", "olive", "moss"]), *, also={"o", "p", "q"}) -> T:
    return Row(FACTOR), Kind.ONE, item in STOP, cached(item), WITHIN, MIXED, BOX, BAG.has(item)

bound = functools.partial(functools.partial(function, greens={"r", "s", "t"}), also=BAG.has)
print(digest_of({"function": function, "load": bound}))
"""


def digest_by(script, path, seed):
    path.write_text(script)
    done = subprocess.run(
        [sys.executable, path], check=True, capture_output=True, text=True, env={**os.environ, "PYTHONHASHSEED": seed}
    )
    return done.stdout


def test_a_function_is_known_in_another_process_and_wherever_it_lies(tmp_path):
    """As after a restart of a kernel, whose number is in the names of its cells' files."""
    script = SCRIPT.replace("FACTOR", "2")
    known = digest_by(script, tmp_path / "one.py", "1")
    (tmp_path / "moved").mkdir()
    assert digest_by("# A line more.\n" + script, tmp_path / "moved" / "two.py", "2") == known
    assert digest_by(SCRIPT.replace("FACTOR", "3"), tmp_path / "one.py", "1") != known
    assert digest_by(script.replace("beta", "beat"), tmp_path / "one.py", "1") != known
    for word in ("two", "zwei", "red", "lime"):
        assert digest_by(script.replace(f'"{word}"', '"other"'), tmp_path / "one.py", "1") != known


def test_a_set_of_values_that_are_long_to_order_costs_no_function():
    shared = bytes(1_000_000)
    members = {dataclasses.make_dataclass("Member", ["n", "data"], frozen=True)(n, shared) for n in range(20)}
    assert digest_of({"function": lambda item: members})


OF_TYPING = """
import functools, typing
UserId = typing.NewType("UserId", int)
P = typing.ParamSpec("P")

class Squares:
    def __init__(self, n):
        self.n = n

    @functools.cached_property
    def all(self):
        return [UserId(i * i) for i in range(self.n)]

def function(item: UserId, call: typing.Callable[P, int] | None = None):
    return Squares(item).all, P.__name__
"""
OF_TYPING_312 = """
type Rows[T] = list[T]

class Pair[*Ts, **Q]:
    def first[U](self, a: U) -> U:
        return a

def function[T: int](item: T) -> Rows[T]:
    match item:
        case int(n) if n > 0:
            return Rows[T].__origin__.__name__, Pair().first(n)
"""


def test_a_function_with_names_of_typing_and_cached_properties_goes_by_value(tmp_path):
    cases = [(OF_TYPING, ([0, 1], "P"))]
    cases += [(OF_TYPING_312, ("Rows", 2))] if sys.version_info >= (3, 12) else []
    for source, result in cases:
        names = {"__name__": "__main__"}
        exec(source, names)
        packed = functions.pack({"function": names["function"], "load": None}, tmp_path)
        (tmp_path / functions.PICKLE).write_bytes(packed.content)
        assert functions.unpack(tmp_path / functions.PICKLE, packed.record)["function"](2) == result


def test_a_value_is_known_by_its_types_and_by_what_it_shares():
    shared = [1]
    lists = [[shared, shared], [shared, [1]], [shared, [True]], [shared, ["1"]], [[1, 1]], [(1,), (1,)], 10**5000]
    assert len({digest_of(each) for each in lists}) == len(lists)
    other = [1]
    for each in (shared, other):
        each.append(each)
    assert digest_of(shared) == digest_of(other)


class Node:
    """Two of them are equal in all but their place."""


def test_an_element_of_a_set_is_known_by_where_else_it_is():
    def marks(number):
        nodes = [Node(), Node()]
        marked = {nodes[number]}  # of the variables of the function, the first by its name
        return lambda item: [node in marked for node in nodes]

    assert digest_of(marks(0)) == digest_of(marks(0)) != digest_of(marks(1))


def test_tuples_of_the_same_tuples_level_by_level_come_to_an_end(monkeypatch):
    monkeypatch.setattr(value_digest, "MOST_BYTES", 1000)
    nested = ()
    for _ in range(60):
        nested = nested, nested
    assert digest_of(nested) != digest_of((nested, 1))


def test_equal_functions_of_two_processes_are_one_version_of_the_code(tmp_path):
    """As of a notebook that hands over the same correction after its kernel was started again."""
    (tmp_path / "run.json").touch()
    given = [Pickled(sha256=sha256, python="3.11", same="s") for sha256 in ("a", "b")]
    first, second = (Snapshot((), {"functions": {"function": each}}) for each in given)
    assert first.digest == second.digest
    assert snapshots.changes(first, second) == []
    for each in (first, second):
        snapshots.write(tmp_path, each)
        assert snapshots.read(tmp_path, each.digest).about["functions"] == each.about["functions"]
    other = Pickled(sha256="b", python="3.11", same="t")
    assert Snapshot((), {"functions": {"function": other}}).digest != first.digest


@functools.lru_cache(maxsize=5)
def fibonacci(n):
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)


def test_a_function_with_a_cache_is_kept_by_value_with_a_cache_of_its_own(tmp_path, monkeypatch):
    assert pickling.name_of(fibonacci) == f"{__name__}:fibonacci"
    monkeypatch.setattr(fibonacci, "__module__", "__main__")
    packed = functions.pack(
        {"function": lambda item: (fibonacci(item), fibonacci.cache_info()), "load": None}, tmp_path
    )
    (tmp_path / functions.PICKLE).write_bytes(packed.content)
    result, info = functions.unpack(tmp_path / functions.PICKLE, packed.record)["function"](30)
    assert result == 832040
    assert (info.misses, info.maxsize, fibonacci.cache_info().misses) == (31, 5, 0)


def test_a_function_of_the_script_that_spawned_a_process_is_kept_by_value(tmp_path, monkeypatch):
    spawned = ModuleType("__mp_main__")
    exec("factor = 3\ndef function(item):\n    return item * factor\n", vars(spawned))
    monkeypatch.setitem(sys.modules, "__mp_main__", spawned)
    packed = functions.pack({"function": spawned.function, "load": None}, tmp_path)
    (tmp_path / functions.PICKLE).write_bytes(packed.content)
    assert functions.unpack(tmp_path / functions.PICKLE, packed.record)["function"](2) == 6


def reads_open_file():
    with open(__file__) as file:
        return by_value(lambda item: file.readline())


def uses_lock():
    names = {"__name__": "__main__", "LOCK": LOCK}
    methods = (
        "    def __call__(self, item):\n        return LOCK\n    def method(self, item):\n        return self(item)"
    )
    exec(f"class UsesLock:\n{methods}", names)
    return names["UsesLock"]()


def captures_lock():
    inner = threading.Lock()
    return by_value(lambda item: inner)


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (by_value(lambda item: LARGE[item]), "the variable 'LARGE' has more than 10 MB"),
        (by_value(lambda item, table=LARGE: table[item]), "the variable 'table' has more than 10 MB"),
        (by_value(lambda item: LOCK), "the variable 'LOCK' cannot be pickled"),
        (captures_lock(), "the variable 'inner' cannot be pickled"),
        (functools.partial(by_value(lambda item, table: item), table=LARGE), "the variable 'table' has more than"),
        (reads_open_file(), "the variable 'file' is an open file"),
        (uses_lock(), "UsesLock cannot be sent to tasks: the variable 'LOCK' cannot be pickled"),
        (uses_lock().method, "method cannot be sent to tasks: the variable 'LOCK' cannot be pickled"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_the_name_of_the_variable(tmp_path, function, sentence):
    with pytest.raises(SlurmGPUError, match=sentence):
        functions.pack({"function": function, "load": None}, tmp_path)


def test_a_function_that_a_fresh_process_cannot_read_is_refused(tmp_path, monkeypatch):
    (tmp_path / "fleeting.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import fleeting

    function = by_value(lambda item: fleeting.x)
    (tmp_path / "fleeting.py").unlink()
    with pytest.raises(
        SlurmGPUError, match="new process, as tasks load it: ModuleNotFoundError: No module named 'fleet"
    ):
        functions.pack({"function": function, "load": None}, tmp_path)


def test_a_pickle_is_loaded_only_if_digest_owner_and_python_agree(tmp_path):
    packed = functions.pack({"function": by_value(lambda item: item), "load": None}, tmp_path)
    path = tmp_path / functions.PICKLE
    evil = f"cos\nsystem\n(Vtouch {tmp_path}/ran\ntR.".encode()
    path.write_bytes(evil)
    with pytest.raises(SlurmGPUError, match="is not the function that the run was submitted with"):
        functions.unpack(path, packed.record)
    assert not (tmp_path / "ran").exists()
    path.write_bytes(packed.content)
    with pytest.raises(SlurmGPUError, match=r"has a function pickled by Python 3\.1, but this is Python 3"):
        functions.unpack(path, {**packed.record, "python": "3.1"})
    path.chmod(0o666)
    with pytest.raises(SlurmGPUError, match="users other than its owner may write it"):
        functions.unpack(path, packed.record)
    path.chmod(0o600)
    assert functions.unpack(path, packed.record)["function"](5) == 5
    path.unlink()
    with pytest.raises(SlurmGPUError, match="the function of this run, is gone"):
        functions.unpack(path, packed.record)


def test_code_in_a_pickle_keeps_its_file_and_its_lines_though_the_file_has_changed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("def inner(n):\n    return 1 / n\n\n\ndef outer(n):\n    return inner(n)  # here\n")
    names = {"__name__": "__main__"}
    exec(compile(script.read_text(), script, "exec"), names)
    packed = functions.pack({"function": names["outer"], "load": None}, tmp_path)
    script.write_text("# nothing is left\n")
    (tmp_path / functions.PICKLE).write_bytes(packed.content)
    linecache.clearcache()
    function = functions.unpack(tmp_path / functions.PICKLE, packed.record)["function"]
    with pytest.raises(ZeroDivisionError) as caught:
        function(0)
    frames = [(frame.filename, frame.lineno, frame.line) for frame in traceback.extract_tb(caught.tb)[1:]]
    assert frames == [(str(script), 6, "return inner(n)  # here"), (str(script), 2, "return 1 / n")]


def test_a_function_with_an_expression_of_many_operators_goes_by_value(tmp_path):
    """Its texts, which may name files, are unknown: Python's own visitor of syntax trees calls itself."""
    names, script = {"__name__": "__main__"}, tmp_path / "script.py"
    script.write_text(f"def total(n):\n    return {' + '.join(['n'] * 1000)}\n")
    exec(compile(script.read_text(), script, "exec"), names)
    assert functions.pack({"function": names["total"], "load": None}, tmp_path).texts == ()


def items_back(path, kind):
    return [UNWRAP[kind](data) for data in Jsonl().items(path)]


@pytest.mark.parametrize(
    "items",
    [
        [{"a": 1, "b": [1.5, None, "é\n"]}, {"c": {"d": True}}],
        [1, "two", None, 3.0, 10**30, [1, {"x": []}], True],
        [(1, "a"), (2, "b")],
        [Path("a/b.wav"), Path("c")],
        range(3),
    ],
)
def test_items_come_back_as_they_were(tmp_path, items):
    path, kind = write_values(iter(items), tmp_path)
    back = items_back(path, kind)
    assert back == list(items)
    assert [type(each) for each in back] == [type(each) for each in items]


def test_nan_and_numpys_numbers_come_back_as_pythons(tmp_path):
    path, kind = write_values([np.float64(0.1), np.int32(7), float("nan"), float("-inf")], tmp_path)
    assert repr(items_back(path, kind)) == "[0.1, 7, nan, -inf]"


def within_itself():
    items = []
    items.append(items)
    return items


def test_tables_are_told_from_their_columns(tmp_path):
    import pandas as pd
    import pyarrow as pa

    frame = pd.DataFrame({"n": [1, 2], "text": ["a", None]}, index=[5, 6])
    assert is_table(frame)
    assert is_table(pa.table({"n": [1]}))
    for column in (frame["n"], pa.chunked_array([[1], [2]]), pa.array([1, 2]), np.array([1, 2])):
        assert not is_table(column)
        assert items_back(*write_values(column, tmp_path)) == [1, 2]


@pytest.mark.parametrize(
    ("items", "sentence"),
    [
        ([], "There are no items"),
        ([{"a": {"b": (1, 2)}}], r"Item 0\['a'\]\['b'\] has a value of type tuple; .* Pass a list"),
        ([{"out": Path("a")}], r"Item 0\['out'\] has a value of type PosixPath; .* Pass str\(path\)\."),
        ([{"t": np.datetime64(1, "ns")}], r"Item 0\['t'\] is a datetime64\[ns\]; .* Pass str\(value\)"),
        ([1, b"x"], "Item 1 has a value of type bytes; expected text"),
        ([{1: 2}], "Item 0 has the key 1; expected text"),
        ([(1, 2), Point(1, 2)], r"Item 1 is a Point, which would come back as a plain tuple. Pass tuple\(item\), or"),
        ([{"a": 1}, 2], "Item 1 is a value, but item 0 is a mapping"),
        ([1, 10**5000], "Item 1 cannot be written as JSON: Exceeds the limit"),
        ([within_itself()], "Item 0 cannot be written as JSON: maximum recursion depth"),
    ],
)
def test_items_that_would_come_back_as_others_are_refused(tmp_path, items, sentence):
    with pytest.raises(SlurmGPUError, match=sentence):
        write_values(items, tmp_path)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 2], "int64"),
        ([1, 2.5], "float64"),
        ([None, True], "bool"),
        ([None], None),
        ([1, "a"], "json"),
        ([True, 1], "json"),
        ([10**30], "json"),
        ([np.float32(1), np.float16(1)], "float32"),
        ([np.zeros((2, 3), "float32")], "float32[2,3]"),
        ([np.zeros(2, "int8"), np.zeros(3, "int8")], "int8[]"),
        ([[1, 2], []], "int64[]"),
        ([[1, 2.5]], "float64[]"),
        ([["a", 1]], "json"),
        ([[[1], [2]]], "json"),
        ([{"a": 1}], "json"),
    ],
)
def test_the_type_of_a_column_is_learnt_from_values_and_holds_them(values, expected):
    found = functools.reduce(type_for_both, map(type_of, values), None)
    assert found == expected
    if found is not None:
        column = columns_of({"x": found}, "test")["x"]
        assert type_of_column(column) == found
        for value in values:
            if value is not None:
                column.convert(value)


def test_arrays_of_several_dimensions_whose_shapes_differ_are_no_json():
    with pytest.raises(
        SlurmGPUError, match=r"types float32\[2,3\] and float32\[4,3\]; .* return a flat list, array\.reshape\(-1\)"
    ):
        type_for_both("float32[2,3]", "float32[4,3]")


def test_a_key_that_is_no_text_names_no_column():
    with pytest.raises(SlurmGPUError, match="the row has the key 0; expected text, the name of a column"):
        types_of_rows([{0: 0.25, 1: 0.75}])


def test_a_value_that_no_column_can_hold_has_no_type():
    with pytest.raises(SlurmGPUError, match=r"^found object \(dtype object\); expected text, a number"):
        type_of(object())


class Typed(TypedDict):
    text: str
    n: int
    lengths: list[int]
    more: dict[str, int]
    maybe: float | None
    emb: Annotated[np.ndarray, Array("float32", 4)]
    unknown: np.ndarray


class Named(NamedTuple):
    score: np.float32
    is_good: bool


@dataclasses.dataclass
class Both:
    a: "float"
    b: Any


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        (
            Typed,
            {
                "text": "text",
                "n": "int64",
                "lengths": "int64[]",
                "more": "json",
                "maybe": "json",
                "emb": "float32[4]",
                "unknown": None,
            },
        ),
        (Named, {"score": "float32", "is_good": "bool"}),
        (Both, {"a": "float64", "b": None}),
        (str, {"result": "text"}),
        (list[float], {"result": "float64[]"}),
        (Annotated[list, Ragged("int8")], {"result": "int8[]"}),
        (Annotated[dict, Json()], {"result": "json"}),
        (dict, {}),
        (dict[str, float], {}),
        (np.ndarray, {}),
        (Any, {}),
        (tuple[int, str], {}),
        (tuple[int, float], {"result": "float64[]"}),
        (tuple[int, ...], {"result": "int64[]"}),
        (np.integer, {}),
        (np.floating, {}),
        (np.float16, {"result": "float16"}),
    ],
)
def test_an_annotation_says_the_columns(hint, expected):
    def function(item): ...

    function.__annotations__["return"] = hint
    if hint == Annotated[dict, Json()]:
        expected = {}  # a mapping is a row
    assert annotated_types(function, batched=False) == expected
    function.__annotations__["return"] = list[hint]
    assert annotated_types(function, batched=True) == expected


@pytest.mark.parametrize("prose", ["the score", "1/0", "np.nothing", "'float"])
def test_an_annotation_that_is_prose_says_nothing(prose):
    def function(item): ...

    function.__annotations__["return"] = prose
    assert annotated_types(function, batched=False) == {}
    function.__annotations__["return"] = dataclasses.make_dataclass("Fields", [("a", prose)])
    assert annotated_types(function, batched=False) == {}


@pytest.mark.parametrize("text", ["S8", "S4[2]", "S2[]", "float32[3,4]", "bool", "int16[]", "json", "text"])
def test_the_type_of_a_column_is_the_one_that_users_write(text):
    assert type_of_column(columns_of({"x": text}, "test")["x"]) == text


def test_who_forgets_load_is_told_of_it():
    for function, is_told in ((lambda item, model: item, True), (lambda: None, False)):
        with pytest.raises(SlurmGPUError, match=r"cannot be called as function\(item\)") as caught:
            functions.check(function, None, loads=False)
        assert ("as load." in str(caught.value)) is is_told


def test_a_function_without_an_annotation_that_can_be_read_says_nothing():
    def function(item) -> "Unheard": ...  # noqa: F821

    assert annotated_types(function, batched=False) == {}
    assert annotated_types(len, batched=False) == {}
    assert type_of_column(Text()) == "text"


def test_no_columns_are_advised_that_there_are_already():
    function = SimpleNamespace(columns={"j": Json(), "n": Array("int64")})
    twice = {1: 1, "1": 2}
    assert Function.explain_misfit(function, {"j": twice, "n": 1}) == ""
    assert "columns={'j': 'json', 'n': 'json'}" in Function.explain_misfit(function, {"j": twice, "n": "one"})


@pytest.mark.parametrize(("value", "found"), [(None, "None"), (0.5, "a float")])
def test_a_result_that_is_no_mapping_where_rows_have_names_is_told_as_what_was_returned(value, found):
    function = SimpleNamespace(columns={"label": Text(), "n": Array("int64")})
    assert Function.explain_misfit(function, as_row(value)) == (
        f"The function returned {found}; expected a mapping with 'label', 'n'."
    )
    unnamed = SimpleNamespace(columns={"result": Array("int64")})
    assert "columns={'result': 'json'}" in Function.explain_misfit(unnamed, as_row(None))
