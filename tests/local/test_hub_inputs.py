"""Data sets of the hub as inputs: a hub on this machine, asked by the real library, and its cache without one."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.hubs import Hub, commit_of, serving

# The library reads its environment when it is imported, so questions are asked in a process of their own.
ASK = """
import json, sys
from pathlib import Path
from slurmgpu.errors import SlurmGPUError
from slurmgpu.inputs import Reader, fetch, find, scan
asked = json.loads(sys.argv[1])
for named in asked["named"]:
    try:
        said = fetch(named) if asked["newest"] else []
        spec = scan(find(named, Path(".")), Path("index"), stride=4)
        with Reader(spec, Path("index")) as reader:
            ids = [item["id"] for item in reader.read(0, spec.n_items)]
        print(json.dumps({"ids": ids, "files": spec.to_json()["files"], "said": said}))
    except SlurmGPUError as error:
        print(json.dumps({"error": str(error)}))
"""


def table(*ids: int) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"id": ids}), file)
    return file.getvalue()


OWN = {
    "README.md": b"texts",
    "data/train-1.parquet": table(3, 4),
    "data/train-0.parquet": table(1, 2),
    "data/deep/train-2.parquet": table(5),
    "data/[odd] x.parquet": table(7),
    "lines.jsonl": b'{"id": 6}\n',
}
CONVERTED = {"default/train/0000.parquet": table(1, 2), "default/train/0001.parquet": table(3)}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with serving({}, lab__gated="GatedRepo") as hub:
        hub.datasets["lab/texts"] = {"main": OWN, "refs/convert/parquet": CONVERTED}
        hub.datasets["lab/cut"] = {
            "main": OWN,
            "refs/convert/parquet": {"default/partial-train/0000.parquet": table(1)},
        }
        hub.datasets["lab/two"] = {
            "main": OWN,
            "refs/convert/parquet": {"default/test/0000.parquet": table(1), "default/train/0000.parquet": table(2)},
        }
        hub.datasets["lab/own"] = {"main": OWN}
        yield hub


def ask(folder: Path, hub: Hub, *named: str | list[str], offline: bool = False, newest: bool = False) -> list[Any]:
    """What planning finds for each input, and what `--fetch` says before that."""
    environ = {**os.environ, "HF_ENDPOINT": hub.address, "HF_HOME": str(folder / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    environ |= {"HF_HUB_OFFLINE": "1"} if offline else {}
    asked = json.dumps({"named": named, "newest": newest})
    done = subprocess.run([sys.executable, "-c", ASK, asked], cwd=folder, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def downloaded(hub: Hub) -> set[str]:
    return {path.partition("/resolve/")[2][41:] for path in hub.asked if "/resolve/" in path}


FOUND: list[tuple[str | list[str], list[int]]] = [
    ("hf://datasets/lab/texts", [1, 2, 3]),
    ("hf://datasets/lab/texts@refs/convert/parquet/default/train/0001.parquet", [3]),
    ("hf://datasets/lab/texts@main/data/*.parquet", [7, 1, 2, 3, 4]),
    ("hf://datasets/lab/texts/data/train-[!0].parquet", [3, 4]),
    ("hf://datasets/lab/texts/data/[odd] x.parquet", [7]),
    (f"hf://datasets/lab/texts@{commit_of(OWN)}/lines.jsonl", [6]),
    (["hf://datasets/lab/own/data/train-1.parquet", "hf://datasets/lab/texts/data/train-0.parquet"], [3, 4, 1, 2]),
]


def test_files_of_the_hub_are_items_there_and_offline(tmp_path: Path, hub: Hub) -> None:
    names = [named for named, _ in FOUND]
    found = ask(tmp_path, hub, *names)
    assert [each["ids"] for each in found] == [ids for _, ids in FOUND]
    assert "data/deep/train-2.parquet" not in downloaded(hub), "a star stays within a folder"
    n_asked = len(hub.asked)
    assert ask(tmp_path, hub, *names, offline=True) == found
    assert ask(tmp_path, hub, *names) == found
    assert not [path for path in hub.asked[n_asked:] if "datasets/" in path], "what is in the cache is not asked for"
    for file in (file for each in found for file in each["files"]):
        where = re.fullmatch(r"hf://datasets/lab/(texts|own)@([0-9a-f]{40})/(.+)", file["source"]["path"])
        assert where
        assert where[2] in (commit_of(OWN), commit_of(CONVERTED))
        assert f"snapshots/{where[2]}/{where[3]}" in file["path"]
    [deep] = ask(tmp_path, hub, "hf://datasets/lab/texts/data/**/train-*.parquet")
    assert deep["ids"] == [5, 1, 2, 3, 4]


def test_a_branch_stays_where_it_was_until_it_is_fetched_again(tmp_path: Path, hub: Hub) -> None:
    named = "hf://datasets/lab/texts/data/train-*.parquet"
    first = ask(tmp_path, hub, named)
    later = {**OWN, "data/train-2.parquet": table(9)}
    hub.datasets["lab/texts"]["main"] = later
    assert ask(tmp_path, hub, named) == first
    [found] = ask(tmp_path, hub, named, newest=True)
    assert found["ids"] == [1, 2, 3, 4, 9]
    assert found["said"][0].startswith(f"{named} at {commit_of(later)[:12]} is in the hub's cache: 3 files, ")
    assert ask(tmp_path, hub, named, offline=True, newest=True) == [found], "fetching what is there needs no hub"


def test_a_cache_that_lacks_a_file_is_completed_or_refused(tmp_path: Path, hub: Hub) -> None:
    ask(tmp_path, hub, "hf://datasets/lab/texts/data/train-0.parquet")
    named = "hf://datasets/lab/texts/data/train-*.parquet"
    [refused] = ask(tmp_path, hub, named, offline=True)
    assert "is incomplete in the hub's cache, and the hub cannot be reached" in refused["error"]
    assert ask(tmp_path, hub, named)[0]["ids"] == [1, 2, 3, 4]


REFUSED = {
    "hf://lab/texts": "names no data set; expected hf://datasets/OWNER/NAME@REVISION/PATH",
    "hf://datasets/lab/texts@main": "has a revision but no files",
    "hf://datasets/lab/none": "does not exist on the hub, or is private",
    "hf://datasets/lab/gated": "is gated: accept its terms",
    "hf://datasets/lab/own": "The hub has not converted",
    "hf://datasets/lab/texts@v9/data/*.parquet": "has no revision 'v9' on the hub",
    "hf://datasets/lab/texts/*.csv": "matches no file. There are README.md, data/",
    "hf://datasets/lab/cut": "converted only the first part of this data set",
    "hf://datasets/lab/two": "in 2 folders, default/test, default/train. Name one of them",
}


def test_what_cannot_be_an_input_from_the_hub_is_refused(tmp_path: Path, hub: Hub) -> None:
    for words, answer in zip(REFUSED.values(), ask(tmp_path, hub, *REFUSED), strict=True):
        assert words in answer.get("error", answer)
    assert not downloaded(hub)
