"""What columns can be declared, and which values they take."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmgpu.errors import SlurmGPUError
from slurmgpu.shards.columns import (
    Array,
    Json,
    Ragged,
    Text,
    check_columns,
    columns_from_json,
    columns_to_json,
    convert_row,
    convert_rows,
)

NUMBERS = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
NUMBERS += ["float16", "float32", "float64", "complex64", "complex128"]
INTEGERS = [name for name in NUMBERS if "int" in name]
FLOATS = ["float16", "float32", "float64"]


def convert(column, value):
    return convert_row({"x": column}, {"x": value})["x"]


@pytest.mark.parametrize("dtype", [*NUMBERS, "S3", ">i4", ">f8", int, float, np.float16])
def test_a_dtype_is_stored_little_endian(dtype):
    stored = Array(dtype).dtype
    assert stored == np.dtype(dtype).newbyteorder("<")
    assert stored.str[0] in "<|"


@pytest.mark.parametrize(
    ("dtype", "advice"),
    [
        ("O", "Ragged"),
        (str, r"Text\(\)"),
        ("U8", r"Text\(\)"),
        ("datetime64[s]", "int64"),
        ("timedelta64[s]", "int64"),
        ([("a", "i4")], "one column for each field"),
        ("V2", "one column for each field"),
        ("longdouble", "float64"),
        ("clongdouble", "complex128"),
        ("S", "S8"),
        (None, "float32"),
        ("floaty", "not a NumPy dtype"),
    ],
)
@pytest.mark.parametrize("kind", [Array, Ragged])
def test_a_dtype_that_files_cannot_hold_is_refused_with_what_to_use(kind, dtype, advice):
    with pytest.raises(SlurmGPUError, match=advice):
        kind(dtype)


@pytest.mark.parametrize("shape", [(-1,), 2.5, "ab", (2, None), (1,) * 32])
def test_a_shape_that_is_none_is_refused(shape):
    with pytest.raises(SlurmGPUError, match="shape"):
        Array("f4", shape)


def test_a_shape_may_be_a_single_size_or_a_list():
    assert Array("f4", 3) == Array("f4", [3]) == Array("f4", (np.int64(3),))
    assert Array("f4", 3).shape == (3,)


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({}, "mapping"),
        (["score"], "mapping"),
        ({"index": Text()}, "written by slurmgpu itself"),
        ({"error": Text()}, "written by slurmgpu itself"),
        ({"a/b": Text()}, "without '/'"),
        ({"a.b": Text()}, "without '/'"),
        ({"a\udcff": Text()}, r"'a\\udcff' is not a valid column name; expected text in UTF-8"),
        ({"": Text()}, "not a valid column name"),
        ({"a\0b": Text()}, "not a valid column name"),
        ({3: Text()}, "not a valid column name"),
        ({"score": "float32"}, r"expected Array\(dtype, shape\)"),
        ({"score": Text}, r"expected Array\(dtype, shape\)"),
    ],
)
def test_columns_that_no_file_can_hold_are_refused_in_the_workloads_name(columns, problem):
    with pytest.raises(SlurmGPUError, match=f"^judge: .*{problem}"):
        check_columns(columns, "judge")


def test_columns_survive_json_in_their_order():
    columns = {"z": Array("f2", (2, 3)), "a": Ragged("<i8"), "m": Text(), "b": Array("?")}
    columns["s"] = Array("f4", nan_is_unknown=True)
    value = columns_to_json(columns)
    assert value["z"] == {"kind": "array", "dtype": "<f2", "shape": [2, 3]}
    assert value["s"] == {"kind": "array", "dtype": "<f4", "shape": [], "nan_is_unknown": True}
    assert list(columns_from_json(value).items()) == list(columns.items())
    assert check_columns(columns, "judge") == columns


def test_a_kind_of_a_later_version_is_refused():
    with pytest.raises(SlurmGPUError, match=r"sparse.*Use the version that wrote it"):
        columns_from_json({"x": {"kind": "sparse"}})


@pytest.mark.parametrize(
    ("column", "value", "expected"),
    [
        (Array("int8"), -128, -128),
        (Array("int8"), 3.0, 3),
        (Array("int8"), np.int64(5), 5),
        (Array("int8"), True, 1),
        (Array("uint64"), 2**64 - 1, 2**64 - 1),
        (Array("int64"), -(2.0**63), -(2**63)),
        (Array("bool"), np.bool_(True), True),
        (Array("bool"), 1, True),
        (Array("float16"), 65519.0, 65504.0),
        (Array("float32"), 0.1, np.float32(0.1)),
        (Array("float32"), 2**24 + 1, 2**24),
        (Array("float64"), 10**30, 1e30),
        (Array("float16"), float("inf"), np.inf),
        (Array("complex64"), 2, 2 + 0j),
        (Array("float32", (2,)), [1, 2.5], [1, 2.5]),
        (Array("int8", (2, 2)), ((1, 2), (3, 4)), [[1, 2], [3, 4]]),
        (Array("float32", (0,)), [], []),
        (Array("int8", (2, 0)), [[], []], [[], []]),
        (Array("S3"), b"ab", b"ab"),
        (Array("S3"), "abc", b"abc"),
        (Array("S3", (2,)), [b"a", b"abc"], [b"a", b"abc"]),
        (Ragged("int16"), range(3), [0, 1, 2]),
        (Ragged("int16"), [], []),
        (Ragged("float32"), np.arange(4)[::2], [0, 2]),
    ],
)
def test_a_value_that_fits_is_stored_with_the_columns_dtype_and_shape(column, value, expected):
    stored = convert(column, value)
    assert isinstance(stored, np.ndarray)
    assert stored.dtype == column.dtype
    assert stored.flags.c_contiguous
    np.testing.assert_array_equal(stored, np.array(expected, column.dtype), strict=True)


@pytest.mark.parametrize("column", [Array("float32", (2,)), Ragged("float16"), Array("complex64", (2,))])
def test_a_value_is_stored_as_ever_where_the_workload_lets_numpy_raise(column):
    with np.errstate(all="raise"):
        np.testing.assert_array_equal(convert(column, [1e-46, 1.0]), [0.0, 1.0])
        with pytest.raises(ValueError, match="cannot hold"):
            convert(column, [1e300, 1.0])


def test_a_masked_array_that_masks_nothing_is_an_array():
    np.testing.assert_array_equal(convert(Ragged("float32"), np.ma.masked_array([1.0], mask=[False])), [1.0])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(), (2,)])
def test_nan_is_a_float_like_any_other(dtype, shape):
    assert np.isnan(convert(Array(dtype, shape), np.full(shape, np.nan))).all()
    assert np.isnan(convert(Array(dtype), float("nan")))


@pytest.mark.parametrize(
    ("column", "value", "problem"),
    [
        (Array("int8"), 128, "128, which int8 cannot hold"),
        (Array("int8"), np.int64(-129), "-129, which int8 cannot hold"),
        (Array("uint64"), -1, "-1, which uint64 cannot hold"),
        (Array("int64"), 2.0**63, "which int64 cannot hold"),
        (Array("int64"), np.uint64(2**63), "9223372036854775808, which int64 cannot hold"),
        (Array("int64"), 10**30, "expected numbers"),
        (Array("int32"), 3.5, "3.5, which int32 cannot hold"),
        (Array("int32"), float("nan"), "nan, which int32 cannot hold"),
        (Array("int32"), float("inf"), "inf, which int32 cannot hold"),
        (Array("int32", (2,)), [1, 2.5], "2.5, which int32 cannot hold"),
        (Array("bool"), 2, "2, which bool cannot hold"),
        (Array("float16"), 65520.0, "65520.0, which float16 cannot hold"),
        (Array("float16", (2,)), [1, 1e6], "1000000.0, which float16 cannot hold"),
        (Array("float32"), 1e39, "which float32 cannot hold"),
        (Array("float32"), 1j, "found complex numbers, expected float32"),
        (Array("complex64"), 1e39, "which complex64 cannot hold"),
        (Array("float32"), "1.5", "found text, expected float32"),
        (Array("int32"), b"1", "found bytes, expected int32"),
        (Array("S3"), 5, "expected |S3"),
        (Array("S3"), b"abcd", "b'abcd', which |S3 cannot hold"),
        (Array("S3"), "é", "ascii"),
        (Array("S3"), b"ab\0", r"b'ab\\x00'; a dtype of bytes drops NUL bytes at the end"),
        (Array("S3", (2,)), ["abc", "a\0"], "drops NUL bytes"),
        (Array("float32"), np.ma.masked_array([1.0], mask=[True]).mean(), "MaskedConstant with masked values; fill"),
        (Ragged("float32"), np.ma.masked_array([1.0, 2.0], mask=[False, True]), "MaskedArray with masked values; fill"),
        (Array("float32"), None, "found None, expected numbers or bytes; a column of floats takes NaN"),
        (Array("int64"), np.datetime64("2024-01-01"), "found datetime64"),
        (Array("float32"), [1.0], r"shape \(1,\), expected \(\)"),
        (Array("float32", (3,)), [1, 2], r"shape \(2,\), expected \(3,\)"),
        (Array("float32", (3,)), 1.0, r"shape \(\), expected \(3,\)"),
        (Array("float32", (2, 2)), [[1, 2], [3]], "found list that NumPy cannot read"),
        (Ragged("int16"), [[1], [2]], r"shape \(2, 1\), expected one dimension"),
        (Ragged("int16"), 3, "expected one dimension"),
        (Ragged("int16"), [70000], "70000, which int16 cannot hold"),
        (Text(), 3, "found int, expected text"),
        (Text(), b"abc", "found bytes, expected text"),
        (Text(), None, "found None, expected text"),
        (Text(), float("nan"), "found nan, expected text; for a missing text use '', or None in a json column"),
        (Text(), np.float32("nan"), "found nan, expected text"),
        (Json(), {"a": float("nan")}, "found dict that JSON cannot hold: it has NaN or an infinity; use None"),
        (Text(), "\ud800", "UTF-8"),
    ],
)
def test_a_value_that_would_lose_something_is_refused_in_the_columns_name(column, value, problem):
    with pytest.raises(ValueError, match=f"^column 'x': .*{problem}".replace("|", r"\|")):
        convert(column, value)


def test_json_is_read_in_little_more_memory_than_its_values_take():
    stored = [b'"%d %s"' % (number, b"a" * 1000) for number in range(8000)]
    stored[5], stored[7000] = '"\N{GRINNING FACE}"'.encode(), b""
    tracemalloc.start()
    found = Json().read(stored)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [len(found), found[4], found[5], found[7000]] == [8000, "4 " + "a" * 1000, "\N{GRINNING FACE}", None]
    assert peak < 2 * kept


@given(value=st.integers(-(2**65), 2**65), dtype=st.sampled_from(INTEGERS))
def test_an_integer_is_stored_exactly_or_refused(value, dtype):
    limits = np.iinfo(dtype)
    if limits.min <= value <= limits.max:
        assert int(convert(Array(dtype), value)) == value
        assert convert(Ragged(dtype), [value]).tolist() == [value]
    else:
        for column, found in [(Array(dtype), value), (Ragged(dtype), [value])]:
            with pytest.raises(ValueError, match="column 'x'"):
                convert(column, found)


@given(value=st.floats(), dtype=st.sampled_from(FLOATS))
def test_a_float_is_rounded_but_never_becomes_infinite(value, dtype):
    with np.errstate(over="ignore"):
        rounded = np.float64(value).astype(dtype)
    for column, found in [(Array(dtype), value), (Array(dtype, (1,)), [value]), (Ragged(dtype), [value])]:
        if np.isinf(rounded) and not np.isinf(value):
            with pytest.raises(ValueError, match="cannot hold"):
                convert(column, found)
        else:
            np.testing.assert_array_equal(convert(column, found).ravel(), [rounded])


@given(value=st.floats(), dtype=st.sampled_from(INTEGERS))
def test_a_float_becomes_an_integer_only_when_it_is_one(value, dtype):
    limits = np.iinfo(dtype)
    if value.is_integer() and limits.min <= int(value) <= limits.max:
        assert int(convert(Array(dtype), value)) == int(value)
    else:
        with pytest.raises(ValueError, match="cannot hold"):
            convert(Array(dtype), value)


@given(text=st.text())
def test_any_text_is_stored_as_utf8(text):
    assert convert(Text(), text).decode() == text


def test_tensors_are_taken_and_say_themselves_why_when_they_cannot_be():
    torch = pytest.importorskip("torch")
    np.testing.assert_array_equal(convert(Array("float16", (2,)), torch.tensor([1.0, 2.5])), [1.0, 2.5])
    assert convert(Array("int32"), torch.tensor(3)) == 3
    with pytest.raises(ValueError, match=r"column 'x': found Tensor .*detach"):
        convert(Array("float32"), torch.tensor(1.0, requires_grad=True))
    with pytest.raises(ValueError, match=r"column 'x': found Tensor .*BFloat16"):
        convert(Array("float32"), torch.tensor(1.0, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("column", "value"),
    [(Array("f4", (2,)), np.zeros(2, "f4")), (Array("f4"), np.zeros((), "f4")), (Ragged("f4"), np.zeros(2, "f4"))],
)
def test_a_row_does_not_change_when_the_workload_reuses_its_buffer(column, value):
    stored = convert(column, value)
    value[...] = 7
    assert not stored.any()


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"a": 1}, "column 'score' is missing"),
        ({"a": 1, "score": 1, "scores": 2}, "column 'scores' is not declared. Did you mean 'score'?"),
        ({"a": 1, "score": 1, "index": 0}, "column 'index' is written by slurmgpu itself"),
        ({"a": 1, "scores": 2}, "column 'score' is missing; column 'scores' is not declared"),
        ({"a": 1, "score": 1, "b": 2}, "column 'b' is not declared. Known: a, score"),
        ({}, "column 'a' is missing; column 'score' is missing"),
        ([1, 2], "a row is a mapping of each column to its value; found list"),
        (None, "found NoneType"),
    ],
)
def test_a_row_has_exactly_the_declared_columns(row, problem):
    with pytest.raises(ValueError) as caught:
        convert_row({"a": Array("i4"), "score": Array("f4")}, row)
    assert problem in str(caught.value)


@pytest.mark.parametrize("dtype", NUMBERS)
def test_the_blank_of_a_failed_item_is_nan_or_zero(dtype):
    blank = Array(dtype, (2,)).blank()
    assert (blank.dtype, blank.shape) == (np.dtype(dtype), (2,))
    assert np.isnan(blank).all() if blank.dtype.kind in "fc" else not blank.any()


def test_the_blank_of_text_and_lists_is_empty():
    assert Text().blank() == b""
    assert Ragged("i2").blank().shape == (0,)
    assert Array("S3").blank() == b""


class Halved(Array):
    """An array of another conversion."""

    def convert(self, value):
        return super().convert(np.asarray(value) / 2)


@pytest.mark.parametrize(
    ("column", "values"),
    [
        (Array("<f2", 3), [np.full(3, i, "<f2") for i in range(4)]),
        (Array("<f2", 3), [np.full(3, i, "<f4") for i in range(4)]),
        (Array(">f4", (2, 2)), [np.full((2, 2), i, ">f4").T for i in range(4)]),
        (Array("<f4", 3), [[1, 2, 3], np.ones(3, "<f4")]),
        (Array("<i8"), [1, 2.0, True]),
        (Halved("<f4", 2), [np.ones(2, "<f4"), np.zeros(2, "<f4")]),
        (Text(), ["a", ""]),
        (Ragged("int8"), [[1], []]),
    ],
)
def test_rows_are_converted_at_once_as_they_are_one_by_one(column, values):
    rows = [{"x": value} for value in values]
    at_once = convert_rows({"x": column}, rows)
    one_by_one = [convert_row({"x": column}, row) for row in rows]
    for found, expected in zip(at_once, one_by_one, strict=True):
        assert bytes(found["x"]) == bytes(expected["x"])
        if column.is_tensor:
            assert (found["x"].dtype, found["x"].shape) == (expected["x"].dtype, expected["x"].shape)
            assert found["x"].flags.c_contiguous
            assert not any(np.shares_memory(found["x"], value) for value in values)


@pytest.mark.parametrize("wrong", [{"x": np.zeros(2)}, {"x": "a"}, {}, {"x": np.zeros(3), "y": 1}])
def test_a_row_that_does_not_fit_is_converted_with_no_other(wrong):
    with pytest.raises(ValueError, match=r"found|columns"):
        convert_rows({"x": Array("<f8", 3)}, [{"x": np.zeros(3)}, wrong])
