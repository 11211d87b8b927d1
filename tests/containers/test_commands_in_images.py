"""Slices and streams of `use = "command"` in a real Apptainer image, whose Python the programs run in."""

import json
from pathlib import Path

import pytest

import slurmgpu as package
from tests.support.nightly import by_night
from tests.support.runs import kill_workers, report, start, toml, wait_until

SCRIPT = """
import json, os, pathlib, sys, time
def row(data):
    while data["text"] == "held" and os.path.exists("held"):
        pathlib.Path("waits").touch()
        time.sleep(0.02)
    if data["text"] == "bad":
        sys.exit("cannot read it")
    return {"n": len(data["text"]), "where": os.environ.get("APPTAINER_NAME", "")}
if sys.argv[1] == "slice":
    with open(sys.argv[3], "w") as out:
        for item in map(json.loads, open(sys.argv[2])):
            print(json.dumps({"index": item["index"], **row(item["data"])}), file=out)
else:
    print(json.dumps({"ready": True}), flush=True)
    for item in map(json.loads, sys.stdin):
        print(json.dumps({"index": item["index"], **row(item["data"])}), flush=True)
"""
RUN = {"slice": ["{in}", "{out}"], "stream": []}
TEXTS = ["a", "held", "bad", "dddd", "eeeee"]


@pytest.mark.parametrize("mode", [by_night("slice"), "stream"])
def test_a_command_runs_in_the_image_and_a_kill_there_changes_no_row(tmp_path, apptainer, mode):
    (tmp_path / "score.py").write_text(SCRIPT)
    (tmp_path / "items.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    run = ["python3", "-S", "score.py", mode, *RUN[mode]]
    tables = {
        "workload": {"use": "command", "batch_size": 2},
        "settings": {"run": run, "columns": {"n": "int32", "where": "text"}, "stream": mode == "stream"},
        "resources": {"gpus": 0, "executor": "local"},
        "container": apptainer.table(),
    }
    lines = ['input = "items.jsonl"', 'run_dir = "run"', "html = false", "lease_s = 4.0"]
    for name, table in tables.items():
        lines += [f"[{name}]", *(f"{key} = {toml(value)}" for key, value in table.items())]
    (tmp_path / "slurmgpu.toml").write_text("\n".join(lines))
    (tmp_path / "held").touch()
    process = start("submit", cwd=tmp_path)
    wait_until((tmp_path / "waits").exists, "the item that waits")
    assert kill_workers(tmp_path / "run") > 0
    (tmp_path / "held").unlink()
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    merged = package.open(tmp_path / "run" / "merged.h5")
    good = [index for index in range(5) if index != 2]
    assert [int(merged["n"][index]) for index in good] == [1, 4, 4, 5]
    assert {merged["where"][index] for index in good} == {Path(apptainer.sif).name}
    [error] = report(tmp_path)["errors"]
    assert error["index"] == 2
    assert "exited with code 1: cannot read it" in error["message"]
