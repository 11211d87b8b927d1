"""The second run of a comparison: that it is of the same items is checked when it is planned, and at each item."""

import json
import shutil
from dataclasses import replace

import pytest

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.plan.planner import draft_run
from slurmgpu.run.creation import create_run
from slurmgpu.shards.columns import Json, Text, columns_to_json, convert_row
from slurmgpu.shards.piece_table import pieces_of
from slurmgpu.shards.userblock import Reader, read_userblock
from slurmgpu.workload import Item
from slurmgpu.workloads.judge.opponents import Opponent
from tests.support.pretend_runs import Pretended
from tests.support.shard_files import flips, join_parts, write
from tests.support.tiny_models import make_unloadable


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    return str(make_unloadable(folder))


COLUMNS = {"text": Text(), "question": Json(), "id": Json(), "finish_reason": Json()}
KEPT = {"question": {"sum": [1, 1]}, "id": 7}


def made(folder, n_items=2, digest="d" * 64, keep=("question", "id")):
    """A run directory with its plan and merged file."""
    folder.mkdir()
    row = convert_row(COLUMNS, {"text": "2", **KEPT, "finish_reason": ["stop"]})
    rows = [row] * (n_items - 1) + [ItemError("too dark")]
    part = write(folder / "part.h5", 0, n_items, columns=COLUMNS, rows=rows)
    join_parts([(0, part, 0, n_items)], folder / "merged.h5", columns=COLUMNS)
    plan = {"input_digest": digest, "keep": {name: name for name in keep}}
    (folder / "run.json").write_text(json.dumps(plan))
    return folder


@pytest.mark.parametrize(
    ("ours", "problem"),
    [
        ({}, None),
        ({"n_items": 3}, "has 2 items, and the input has 3"),
        ({"digest": "e" * 64}, "have different inputs"),
    ],
)
def test_runs_of_other_items_are_not_compared(tmp_path, ours, problem):
    judged, opponent = made(tmp_path / "one", **ours), Opponent.find(str(made(tmp_path / "two")))
    files, n_items, field = [judged / "merged.h5"], ours.get("n_items", 2), "text"
    if problem is None:
        opponent.check_input(files, n_items, field)
    else:
        with pytest.raises(SlurmGPUError, match=problem):
            opponent.check_input(files, n_items, field)
    (judged / "run.json").unlink()
    if "n_items" not in ours:
        opponent.check_input(files, n_items, field)  # without a plan only the number tells


def test_a_second_run_that_is_not_there_is_to_be_submitted_first(tmp_path):
    with pytest.raises(SlurmGPUError, match=r"no run or merged file \S+/old\. .*submit that run first.*--after"):
        Opponent.find(str(tmp_path / "old"))


def test_planning_asks_the_workload_about_its_input(slurmgpu, project, model):
    folder = project(items=[])
    made(folder / "one", 3)
    made(folder / "two", 2)
    settings = f'[settings]\nmodel = "{model}"\nrubric = "pairwise"\nagainst = "two"\n'
    (folder / "judge.toml").write_text(f'input = "one/merged.h5"\n[workload]\nuse = "judge"\n{settings}')
    done = slurmgpu("submit", "judge.toml", "--gpus", "0", "--dry-run", cwd=folder)
    assert done.returncode != 0
    assert "has 2 items, and the input has 3" in " ".join(done.stderr.split())


def awaited(folder, columns=("text", "question"), n_shards=2):
    """A run that has computed nothing yet."""
    plan = Pretended(n_shards=n_shards).plan(folder.name)
    columns = columns_to_json({name: Text() for name in columns})
    return create_run(folder, replace(plan, columns=columns, keep={"question": "question"}), [])


def test_two_runs_that_are_not_complete_are_compared_if_both_are_waited_for(tmp_path, model, project):
    folder = project(items=[], settings={"model": model, "rubric": "pairwise", "against": "two"})
    run_file = folder / "slurmgpu.toml"
    run_file.write_text(
        run_file.read_text().replace("workloads.py:Rows", "judge").replace("items.jsonl", "one/merged.h5")
    )
    one, two = awaited(folder / "one"), awaited(folder / "two")

    def drafted(*after):
        return draft_run(run_file, {"resources": {"gpus": 0}}, after=after)

    with drafted(one, two) as draft:
        assert draft.plan.n_items == one.plan.n_items
        assert draft.plan.settings["against"] == {
            "path": str(two.merged),
            "fingerprint": two.plan.fingerprint,
            "keep": ["question"],
        }
    refused = rf"reads {two.merged}, but that run is not complete. .* --after {two.folder} \(in Python: after="
    with pytest.raises(SlurmGPUError, match=refused), drafted(one):
        pass
    shutil.rmtree(two.folder)
    awaited(two.folder, columns=["question"])
    refused = r"two/merged.h5 has no column 'text', whose texts are compared; it has question\."
    with pytest.raises(SlurmGPUError, match=refused), drafted(one, two):
        pass
    shutil.rmtree(two.folder)
    awaited(two.folder, n_shards=3)
    with pytest.raises(SlurmGPUError, match="has 40 items, and the input has 24"), drafted(one, two):
        pass


def test_a_run_that_lacks_rows_is_compared_once_it_is_complete(tmp_path):
    two = awaited(tmp_path / "two")
    row = convert_row(COLUMNS, {"text": "2", **KEPT, "finish_reason": ["stop"]})
    part = write(tmp_path / "part.h5", 0, 1, columns=COLUMNS, rows=[row])
    join_parts([(0, part, 0, 1)], two.merged, n_items=2, columns=COLUMNS)
    opponent = Opponent.find(str(two.folder))
    assert opponent.awaited is not None
    assert opponent.fingerprint == two.plan.fingerprint
    again = Opponent.find(json.loads(json.dumps(opponent.to_json())))
    with pytest.raises(SlurmGPUError, match="its run is incomplete"):
        again.open()


def test_a_pair_of_two_items_is_an_error_where_kept_fields_tell(tmp_path):
    found = Opponent.find(str(made(tmp_path / "two")))
    opponent = Opponent.find(json.loads(json.dumps(found.to_json())))  # as the plan keeps it
    opponent.open()
    assert opponent.row(Item(0, {"text": "3", **KEPT, "finish_reason": ["length"]}), ["text"])["text"] == "2"
    assert opponent.row(Item(0, {"text": "3", "id": 7.0}), ["text"])["text"] == "2"
    with pytest.raises(ItemError, match=r"field 'id' is 8 here and 7 in .*: the items differ"):
        opponent.row(Item(0, {"text": "3", **KEPT, "id": 8}), ["text"])
    assert opponent.row(Item(0, {"id": 8}), ["text", "id"])["id"] == 7  # it is what is compared
    for index, reason in ((1, "the item failed in .*: too dark"), (2, "has no item 2: it has 2")):
        with pytest.raises(ItemError, match=reason):
            opponent.row(Item(index, {}), ["text"])


def test_a_run_that_keeps_nothing_is_joined_by_index_alone(tmp_path):
    opponent = Opponent.find(str(made(tmp_path / "two", keep=())))
    opponent.open()
    assert opponent.row(Item(0, {"id": 8}), ["text"])["id"] == 7


def test_an_opponents_bytes_are_verified_at_planning_and_at_each_item(tmp_path):
    folder = made(tmp_path / "two", 3)
    path, opponent = folder / "merged.h5", Opponent.find(str(folder))
    opponent.open()
    with Reader(path) as reader:
        directory, table, _ = read_userblock(reader)
    [piece] = [piece for piece in pieces_of(directory, table) if piece.name == "text/values of shard 0"]
    for _ in flips(path, [piece.offset]):
        with pytest.raises(ItemError, match=r"text/values of shard 0 differs.*slurmgpu merge.*resubmit --failed"):
            opponent.row(Item(0, dict(KEPT), 0), ["text"])
        with pytest.raises(SlurmGPUError, match=r"text/values of shard 0 differs.*slurmgpu merge"):
            Opponent.find(str(folder))
    assert opponent.row(Item(0, dict(KEPT), 0), ["text"])["text"] == "2"
