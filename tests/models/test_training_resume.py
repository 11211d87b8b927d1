"""A training that was killed, stopped or moved ends as one that was left alone: on the CPU, bit for bit."""

import json

import pytest

torch = pytest.importorskip("torch")

from tests.support.nightly import by_night  # noqa: E402
from tests.support.resuming import BY_NIGHT, CASES, FIXED, GIVEN, N_SAMPLES  # noqa: E402

EXACT = [name for name in CASES if name != "on other numbers"]
EQUAL = ("steps", "epochs", "samples", "final", "best", "best_step", "score", "ended")
EQUAL += ("curve_steps", "curve", "eval_steps", "eval_curve")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, slurmgpu):
    """Where all cases of the gate have run."""
    folder = tmp_path_factory.mktemp("resuming")
    slurmgpu.module("tests.support.resuming", folder, *(case for case in CASES if case not in BY_NIGHT))
    return folder


@pytest.fixture
def found(folder, slurmgpu):
    """What came of a case: {"undisturbed": {"outcome", "ends"}, "disturbed": …}."""

    def load(case):
        if case in BY_NIGHT and not (folder / case).exists():
            slurmgpu.module("tests.support.resuming", folder, case)
        return json.loads((folder / case / "outcomes.json").read_text())

    return load


def same_weights(folder, name):
    one, other = (torch.load(folder / kind / name, weights_only=True) for kind in ("undisturbed", "disturbed"))
    return one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())


@pytest.mark.parametrize("case", [by_night(case) if case in BY_NIGHT else case for case in EXACT])
def test_a_training_that_was_taken_up_again_ends_bit_for_bit_as_one_that_was_left_alone(folder, found, case):
    ends = found(case)["disturbed"]["ends"]
    disturbance = "stopped" if "stopped" in case else "killed"
    assert ends == [disturbance] * (len(CASES[case].attempts) - 1) + ["finished"]
    outcomes = [found(case)[kind]["outcome"] for kind in ("undisturbed", "disturbed")]
    for name in EQUAL:
        assert outcomes[0][name] == outcomes[1][name], name
    assert same_weights(folder / case, "last.pt")
    assert same_weights(folder / case, "best.pt")
    assert [outcome["resumed"] > 0 for outcome in outcomes] == [False, True]


def test_a_damaged_checkpoint_costs_the_steps_after_the_one_before(folder):
    assert list((folder / "damaged" / "disturbed").glob("step-*.damaged"))


@pytest.mark.parametrize("case", [case for case in EXACT if "stopped" in case])
def test_a_training_that_is_stopped_says_where_on_all_ranks(folder, case):
    attempts = CASES[case].attempts[:-1]
    for number, attempt in enumerate(attempts):
        files = [folder / case / "disturbed" / f"stopped-{number}-{rank}.txt" for rank in range(attempt.world_size)]
        told = {file.read_text() for file in files}
        assert len(told) == 1
        assert "after step" in told.pop()


def test_an_evaluation_can_be_stopped(folder):
    told = [path.read_text() for path in (folder / "stopped on 1" / "disturbed").glob("stopped-*.txt")]
    assert any("in the evaluation" in each for each in told)


def test_on_another_number_of_processes_each_sample_of_an_epoch_is_seen_once(folder, found):
    assert found("on other numbers")["disturbed"]["ends"] == ["stopped", "stopped", "finished"]
    steps_of_epoch = -(-N_SAMPLES // FIXED["global_batch_size"])
    seen = []
    for number in range(len(CASES["on other numbers"].attempts)):
        files = (folder / "on other numbers" / "disturbed").glob(f"seen-{number}-*.txt")
        # One that comes again is computed in vain: by a process without a part in a step, or to order DDP's buckets.
        batches = {line for file in files for line in file.read_text().splitlines()}
        seen += [index for batch in batches for index in json.loads(batch)]
    counts = [seen.count(index) for index in range(N_SAMPLES)]
    assert counts == [GIVEN["epochs"]] * N_SAMPLES
    assert found("on other numbers")["disturbed"]["outcome"]["steps"] == GIVEN["epochs"] * steps_of_epoch


def test_on_another_number_of_processes_a_training_ends_with_the_same_loss(folder, found):
    outcomes = [found("on other numbers")[kind]["outcome"] for kind in ("undisturbed", "disturbed")]
    for name in ("curve", "eval_curve"):
        assert outcomes[1][name] == pytest.approx(outcomes[0][name], rel=1e-4), name
    assert outcomes[1]["final"] == pytest.approx(outcomes[0]["final"], rel=1e-4)
    weights = [torch.load(folder / "on other numbers" / kind / "last.pt") for kind in ("undisturbed", "disturbed")]
    for name, value in weights[0].items():
        assert torch.allclose(value, weights[1][name], atol=1e-4), name
