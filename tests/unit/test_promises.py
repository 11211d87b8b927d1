"""docs/explanation/promises.md names tests that there are, and that run by day."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROMISES = re.findall(
    r"^\| (.+?) \| `(tests/\w+/\w+\.py)::(\w+)` \|$", (ROOT / "docs/explanation/promises.md").read_text(), re.M
)


def test_each_line_of_the_table_is_read():
    lines = [line for line in (ROOT / "docs/explanation/promises.md").read_text().splitlines() if line.startswith("|")]
    assert len(PROMISES) == len(lines) - 2 > 40


@pytest.mark.parametrize(("promise", "path", "name"), PROMISES, ids=[name for _, _, name in PROMISES])
def test_a_promise_has_its_test(promise, path, name):
    [test] = [each for each in ast.parse((ROOT / path).read_text()).body if getattr(each, "name", "") == name]
    assert "nightly" not in [getattr(mark, "attr", "") for mark in test.decorator_list]
