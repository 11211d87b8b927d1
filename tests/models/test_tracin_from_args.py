"""`init tracin --from-args`: a run file from the command line of the scripts that tracin replaces."""

import inspect
import json
from pathlib import Path

import pytest

from slurmgpu.errors import SlurmGPUError
from slurmgpu.plan.run_file import read_toml
from slurmgpu.workloads.tracin.from_args import FLAGS, translate
from slurmgpu.workloads.tracin.workload import Tracin
from tests.support.tracin_projects import N_TRAIN, make_project

NEEDED = "--model-path model.pt --train train.txt --entity-to-id node_dict.txt --relation-to-id rel_dict.txt"


@pytest.fixture
def files(tmp_path, monkeypatch):
    make_project(tmp_path)
    (tmp_path / "tracin.toml").unlink()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_run_file_that_is_written_runs_as_it_is(files, slurmgpu):
    text = f"python run_tracin.py {NEEDED} --test test.txt --output o.json --csv-output o.csv --device cpu --top-k 3"
    done = slurmgpu("init", "tracin", "--from-args", text, cwd=files, expect=0)
    assert "slurmgpu submit slurmgpu.toml --dry-run" in done.stdout
    slurmgpu("submit", "--executor", "debug", cwd=files, expect=0, OMP_NUM_THREADS="1")
    command = next(line for line in done.stdout.splitlines() if line.startswith("--csv-output")).partition("slurmgpu ")[
        2
    ]
    slurmgpu(*command.split(), cwd=files, expect=0)
    assert len((files / "o.csv").read_text().splitlines()) == 1 + 12 * 3


def test_of_every_flag_it_is_said_what_became_of_it(files):
    values = {"--mode": "test", "--device": "cuda", "--test": "test.txt", "--test-triples": "test.txt"}
    for name, flag in FLAGS.items():
        value = values.get(name, "1") if flag.takes else ""
        said = dict(translate(f"{name} {value}", files, "slurmgpu").lines)
        assert said[name], name


SEVERAL_LINES = f"""python run_tracin.py \\
  {NEEDED} \\
    --test test.txt --top-k 3 \\\r
  --output "o 1.json"
"""


def test_a_command_of_several_lines_is_one(files):
    found = translate(SEVERAL_LINES, Path(), "slurmgpu")
    assert (found.settings["top_k"], found.input) == (3, "test.txt")
    assert dict(found.lines)["--output"].endswith("slurmgpu export runs/slurmgpu --format json -o 'o 1.json'")


@pytest.mark.parametrize(
    ("text", "flag", "said"),
    [
        ("--mode self --top-k 10", "--top-k", "mode self lists nothing, so top_k = 0"),
        ("--device cpu --enable-multi-gpu", "--enable-multi-gpu", "not carried over: --device cpu"),
        ("--device cuda --enable-multi-gpu", "--enable-multi-gpu", "gpus = 4"),
        ("--top-k 3", "--learning-rate", "for the scripts' default set learning_rate = 0.001"),
        ("--test test.txt --mode single --test-indices 1", "--test-indices", "a sorted list without duplicates"),
        ("--test test.txt --max-test-triples 1", "--max-test-triples", "a sorted list without duplicates"),
        ("--mode single --output r.json", "--output", "mode single wrote a list of test_triple"),
        ("--mode single --csv-output r.csv", "--csv-output", "mode single wrote one file for each"),
        (
            "--output new/r.json",
            "--output",
            "mkdir -p new && slurmgpu export runs/slurmgpu --format json -o new/r.json",
        ),
    ],
)
def test_what_is_said_of_a_flag_is_what_was_done(files, text, flag, said):
    assert said in dict(translate(text, Path(), "slurmgpu").lines)[flag]


@pytest.mark.parametrize("text", ["--test-triples test.txt --start-index 1", "--output r.json", "--top-k 3"])
def test_nothing_is_said_that_is_not_so(files, text):
    said = " ".join(line for _, line in translate(f"{text} --learning-rate 1", Path(), "slurmgpu").lines)
    assert not any(word in said for word in ("sorted", "single", "mkdir", "0.001"))


def test_settings_are_those_that_tracin_has():
    known = inspect.signature(Tracin).parameters
    assert {flag.setting for flag in FLAGS.values()} - {None} <= set(known)


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("--learning-rate 1e-2 --top-k 7", {"learning_rate": 0.01, "top_k": 7}),
        ("--learning-rate=1e-2", {"learning_rate": 0.01}),
        ("--use-last-layers-only --num-last-layers 2", {"parameters": "last"}),
        ("--use-last-layers-only --last-layer-names fc conv1", {"parameters": ["fc", "conv"]}),
        ("--use-mixed-precision", {"precision": "fp16"}),
        ("--edge-map e.json --node-name-dict n.txt", {"edge_map": "e.json", "names": "n.txt"}),
        ("--test-triples test.txt", {"n_hops": 2}),
        ("--test-triples test.txt --skip-filtering", {}),
        ("--output-dir out --n-hops 3 --no-preserve-test-edges", {"n_hops": 3, "preserve_test_edges": False}),
        ("--mode self --train train.txt", {"train": "train.txt", "top_k": 0}),
        ("--batch-size 512 --embedding-dim 200 --use-torch-compile", {}),
    ],
)
def test_a_flag_is_the_setting_that_it_was(files, text, settings):
    assert translate(text, files, "slurmgpu").settings == settings


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("--test test.txt", None),
        ("--test test.txt --mode single", [0]),
        ("--test test.txt --mode single --test-indices 5 2", [5, 2]),
        ("--test test.txt --max-test-triples 2", [0, 1]),
        ("--test-triples test.txt --start-index 3 --max-triples 2", [3, 4]),
        ("--test-triples test.txt --start-index 10", [10, 11]),
    ],
)
def test_chosen_test_triples_become_a_file_with_their_lines(files, slurmgpu, text, lines):
    slurmgpu("init", "tracin", "--from-args", f"{NEEDED} {text}", "-o", "x.toml", cwd=files, expect=0)
    config = read_toml(files / "x.toml")
    if lines is None:
        assert config["input"] == "test.txt"
        assert not (files / "x.tests.jsonl").exists()
        return
    assert config["input"] == "x.tests.jsonl"
    items = [json.loads(line) for line in (files / "x.tests.jsonl").read_text().splitlines()]
    triples = (files / "test.txt").read_text().splitlines()
    assert [item["line"] for item in items] == lines
    assert ["\t".join([item["head"], item["relation"], item["tail"]]) for item in items] == [triples[n] for n in lines]


def test_self_influence_is_that_of_the_training_triples(files, slurmgpu):
    slurmgpu("init", "tracin", "--from-args", f"{NEEDED} --mode self --device cpu", cwd=files, expect=0)
    done = slurmgpu("submit", "--executor", "debug", cwd=files, expect=0, OMP_NUM_THREADS="1")
    assert f"{N_TRAIN} of {N_TRAIN} rows" in done.stdout
    out = slurmgpu("export", "runs/slurmgpu", "--format", "json", "-o", "-", cwd=files, expect=0).stdout
    values = [one["self_influence"] for one in json.loads(out)]
    assert values == sorted(values, reverse=True)
    assert (len(values), list(json.loads(out)[0])) == (N_TRAIN, ["head", "relation", "tail", "self_influence"])


def test_several_gpus_are_an_array(files):
    assert translate("--enable-multi-gpu --device cuda", files, "x").resources == {"gpus": 4, "array": True}
    assert translate("--device cpu", files, "x").resources == {"gpus": 0, "array": False}


def test_paths_are_relative_to_the_run_file(files, slurmgpu):
    (files / "runs").mkdir()
    slurmgpu("init", "tracin", "--from-args", f"{NEEDED} --test test.txt", "-o", "runs/a.toml", cwd=files, expect=0)
    config = read_toml(files / "runs" / "a.toml")
    assert (config["input"], config["settings"]["model"]) == ("../test.txt", "../model.pt")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("--model-pth m.pt", "Did you mean '--model-path'?"),
        ("--model-path", "--model-path takes one value; found none."),
        ("--model-path a b", "--model-path takes one value; found a b."),
        ("--use-torch-compile yes", "takes no value; found yes."),
        ("--top-k many", "--top-k takes whole numbers; found many."),
        ("--mode slow", "expected test, self, single"),
        ("--device tpu", "expected cpu or cuda"),
        ("--test test.txt --test-indices 99", "there is no triple 99 in test.txt: it has 12"),
        ("--test nowhere.txt --max-test-triples 1", "cannot read the test triples in nowhere.txt"),
        ("--train 'x", "cannot be read as a command line"),
        ("", "has no flag"),
    ],
)
def test_a_wrong_flag_is_a_sentence(files, text, sentence):
    with pytest.raises(SlurmGPUError) as raised:
        translate(text, files, "slurmgpu")
    assert sentence in str(raised.value)


def test_it_is_for_tracin_and_overwrites_nothing(files, slurmgpu):
    assert "works with tracin only" in slurmgpu("init", "embed", "--from-args", NEEDED, cwd=files, expect=2).stderr
    (files / "slurmgpu.toml").write_text("mine")
    assert "exists" in slurmgpu("init", "tracin", "--from-args", NEEDED, cwd=files, expect=2).stderr
    assert (files / "slurmgpu.toml").read_text() == "mine"


def test_init_proposes_settings_that_tracin_takes(files):
    lines = Tracin.template.settings.read_text().splitlines()
    (files / "settings.toml").write_text("\n".join(line.removeprefix("# ") for line in lines))
    Tracin(**read_toml(files / "settings.toml"))
    assert (Tracin.template.input, Tracin.template.gpus, Tracin.template.array) == ("test.txt", 1, False)
