"""`make test-oldest` takes the oldest versions that pyproject.toml allows."""

import re
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

HOME = Path(__file__).parents[2]
EXTRAS = ("duckdb", "html", "isal", "pandas", "parquet")


def test_the_oldest_versions_that_are_tested_are_those_that_are_allowed():
    project = (HOME / "pyproject.toml").read_text()
    tables = [re.search(r"^dependencies = (\[.*?^\])", project, re.MULTILINE | re.DOTALL)[1]]
    tables += [re.search(rf"^{extra} = (\[.*\])$", project, re.MULTILINE)[1] for extra in EXTRAS]
    allowed = [Requirement(text) for table in tables for text in re.findall(r'"(.+?)"', table)]
    allowed = {found.name: found for found in allowed if found.name != "slurmgpu"}
    lines = [line for line in (HOME / "tests" / "oldest.txt").read_text().splitlines() if not line.startswith("#")]
    oldest = [found for found in map(Requirement, lines) if _is_for(found, "3.10")]
    assert {found.name: _version(found) for found in oldest} == {name: _version(each) for name, each in allowed.items()}


def _version(requirement):
    [bound] = requirement.specifier
    return Version(bound.version)


def _is_for(requirement, python):
    return requirement.marker is None or requirement.marker.evaluate({"python_version": python})
