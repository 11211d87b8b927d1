"""Checkpoints are whole or not there: what is killed, full or damaged costs one of them, never the training."""

import errno
import gc
import json
import logging
import os
import pathlib
import pickle
import random
import shutil
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from slurmgpu.errors import SlurmGPUError  # noqa: E402
from slurmgpu.training import checkpoint_files, checkpoints, states  # noqa: E402
from slurmgpu.training.checkpoints import Checkpoints  # noqa: E402
from slurmgpu.training.ranks import Place  # noqa: E402
from tests.support import checkpoint_ranks  # noqa: E402
from tests.support.shard_files import small_disk  # noqa: E402, F401

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


def save(kept, step):
    """A checkpoint from which `step` can be read."""
    kept.save(step, shared={"step": step, "weight": torch.full((50,), float(step))}, own={"step": step})


def kept_in(folder, *steps, keep=2):
    """Checkpoints of some steps."""
    kept = Checkpoints(folder, Place(), keep)
    for step in steps:
        save(kept, step)
    return kept


def check_last(kept, step):
    last = kept.last()
    assert (last.step, last.world_size) == (step, 1)
    assert last.shared()["weight"].tolist() == [step] * 50
    assert last.own() == {"step": step}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# What is kept


def test_the_last_two_are_kept(tmp_path):
    kept = kept_in(tmp_path / "new", 1, 20, 300, 4000)
    assert kept.steps() == [300, 4000]
    assert names(tmp_path / "new") == ["step-0000000300", "step-0000004000"]
    check_last(kept, 4000)
    kept.clear()
    assert names(tmp_path / "new") == []


def test_a_folder_without_checkpoints_has_none(tmp_path):
    kept = kept_in(tmp_path / "new")
    assert kept.last() is None
    assert kept.steps() == []


def test_a_step_that_is_there_is_kept_as_it_is(tmp_path):
    kept = kept_in(tmp_path, 1)
    kept.save(1, shared={}, own={})
    check_last(kept, 1)


def test_a_step_whose_state_has_changed_is_replaced(tmp_path):
    kept = kept_in(tmp_path, 1, 2)
    kept.save(2, shared={"step": "again"}, own={}, replace=True)
    assert kept.last().shared() == {"step": "again"}
    kept.save(3, shared={"step": 3}, own={}, replace=True)
    assert names(tmp_path) == ["step-0000000002", "step-0000000003"]


def test_the_files_are_summed_as_they_are_written(tmp_path):
    path = tmp_path / "state.pt"
    sums = checkpoint_files.write_state(path, {"a": torch.randn(100_000), "b": [1, {"c": "d"}]})
    assert sums == checkpoint_files.checksum_of(path)
    assert sums.bytes == path.stat().st_size


@pytest.mark.parametrize("odd", [object(), Path("x"), lambda: 0], ids=["an object", "a path", "a function"])
def test_a_state_that_could_not_be_read_back_is_refused(tmp_path, odd):
    kept = kept_in(tmp_path, 1)
    with pytest.raises(SlurmGPUError, match=r"cannot be saved in a checkpoint.*state_dict"):
        kept.save(2, shared={"scheduler": {"lr": [0.1, odd]}}, own={})
    assert names(tmp_path) == ["step-0000000001"]


def test_numpys_numbers_are_kept_as_pythons(tmp_path):
    kept = Checkpoints(tmp_path, Place())
    state = {"_last_lr": [np.float64(0.5)], "at": (np.int64(3), {"is": np.bool_(True)})}
    kept.save(1, shared={"scheduler": state}, own={})
    assert kept.last().shared() == {"scheduler": {"_last_lr": [0.5], "at": (3, {"is": True})}}


def test_what_cannot_be_kept_is_named_in_one_line(tmp_path):
    with pytest.raises(SlurmGPUError, match=r"multiarray") as caught:
        Checkpoints(tmp_path, Place()).save(1, shared={"scheduler": np.arange(3)}, own={})
    assert str(caught.value).isprintable()


@pytest.mark.timeout(60)
def test_a_fifo_among_the_leftovers_is_removed_and_not_waited_for(tmp_path):
    Checkpoints(tmp_path, Place()).save(1, shared={}, own={})
    for name in (".step.partial", ".step.removed"):
        os.mkfifo(tmp_path / name)
    assert Checkpoints(tmp_path, Place()).last().step == 1
    assert names(tmp_path) == ["step-0000000001"]


# What is damaged


def truncated(path):
    path.write_bytes(path.read_bytes()[:-10])


def flipped(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)


def emptied(path):
    path.write_bytes(b"")


def of_another_version(path):
    about = json.loads(path.read_text())
    about.pop("crc32")
    about["version"] = 99
    path.write_text(json.dumps(about | {"crc32": checkpoints._sum_json(about)}))


def of_more_ranks(path):
    path.write_text(json.dumps(json.loads(path.read_text()) | {"world_size": 2}))


def of_another_step(path):
    shutil.copyfile(path.parent.with_name("step-0000000001") / path.name, path)


def of_another_shape(path):
    path.write_text("[1, 2]")


DAMAGES = [
    (name, damage)
    for name in ("shared.pt", "rank-0.pt", "checkpoint.json")
    for damage in (truncated, flipped, emptied, Path.unlink)
]
DAMAGES += [
    ("checkpoint.json", damage) for damage in (of_another_version, of_more_ranks, of_another_step, of_another_shape)
]


@pytest.mark.parametrize(("name", "damage"), DAMAGES, ids=lambda value: getattr(value, "__name__", value))
def test_of_a_damaged_checkpoint_the_one_before_is_used(tmp_path, caplog, name, damage):
    kept = kept_in(tmp_path, 1, 2)
    damage(tmp_path / "step-0000000002" / name)
    check_last(kept, 1)
    assert kept.steps() == [1]
    assert "checkpoint of step 2 not used" in caplog.text
    assert name in caplog.text
    assert names(tmp_path) == ["step-0000000001", "step-0000000002.damaged"]
    save(kept, 2)
    check_last(kept, 2)


def test_with_no_whole_checkpoint_the_training_begins_anew_and_says_so(tmp_path, caplog):
    kept = kept_in(tmp_path, 1, 2)
    for step in (1, 2):
        flipped(tmp_path / f"step-000000000{step}" / "shared.pt")
    assert kept.last() is None
    assert "training from the start" in caplog.text


def test_a_checkpoint_that_cannot_be_read_now_is_left_alone(tmp_path, caplog):
    kept = kept_in(tmp_path, 1, 2)
    for step in (1, 2):
        path = tmp_path / f"step-000000000{step}" / "rank-0.pt"
        path.rename(tmp_path / f"{step}.pt")
        path.symlink_to(path)  # ELOOP is an error of reading
    with pytest.raises(OSError, match=r"cannot read any checkpoint in"):
        kept.last()
    assert kept.steps() == [1, 2]
    (tmp_path / "1.pt").rename(tmp_path / "step-0000000001" / "rank-0.pt")
    check_last(kept, 1)
    assert "cannot be read" in caplog.text
    assert kept.steps() == [1, 2]


# What is killed, full or not alone


FORKING = threading.Lock()
"""The library filelock refuses a fork while another thread forks."""


def in_a_child(action):
    """The exit status of `action` in a process of its own: a fork, since torch takes seconds to import."""
    with FORKING:
        pid = os.fork()
    if pid == 0:
        try:
            action()
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed_at(number, action):
    """`action` in a process that dies by SIGKILL at the n-th of the calls that change the disk; its exit status."""

    def run():
        calls = 0

        def dying(call):
            def called(*args, **kwargs):
                nonlocal calls
                calls += 1
                if calls == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*args, **kwargs)

            return called

        os.fsync, Path.rename, Path.replace = dying(os.fsync), dying(Path.rename), dying(Path.replace)
        shutil.rmtree = dying(shutil.rmtree)
        action()

    return in_a_child(run)


def test_a_writer_killed_anywhere_leaves_a_whole_checkpoint(tmp_path):
    kept = kept_in(tmp_path, 1, 2)
    ended, number = -signal.SIGKILL, 0
    steps = set()
    while ended == -signal.SIGKILL:
        number += 1
        shutil.rmtree(tmp_path)
        kept_in(tmp_path, 1, 2)
        ended = killed_at(number, lambda: save(kept, 3))
        step = kept.last().step
        check_last(kept, step)
        steps.add(step)
        assert all(name.startswith("step-") for name in names(tmp_path))
    assert ended == 0
    assert number > 8
    assert steps == {2, 3}


def test_a_writer_killed_while_it_replaces_leaves_the_old_or_the_new(tmp_path):
    ended, number, found = -signal.SIGKILL, 0, []
    while ended == -signal.SIGKILL:
        number += 1
        shutil.rmtree(tmp_path)
        kept = kept_in(tmp_path, 1, keep=1)
        ended = killed_at(number, lambda kept=kept: kept.save(1, shared={"new": True}, own={}, replace=True))
        found.append("new" in kept.last().shared())
        assert names(tmp_path) == ["step-0000000001"]
    assert ended == 0
    assert found == sorted(found)
    assert set(found) == {False, True}


def test_weights_that_another_process_sweeps_away_are_written_again(tmp_path, monkeypatch, caplog):
    write, calls = checkpoint_files.write_state, []

    def meanwhile(path, state):
        calls.append(path)
        sums = write(path, state)
        if len(calls) == 1:
            Checkpoints(tmp_path, Place()).last()
        return sums

    monkeypatch.setattr(checkpoint_files, "write_state", meanwhile)
    checkpoint_files.save_weights(tmp_path / "best.pt", {"a": torch.ones(3)})
    assert torch.load(tmp_path / "best.pt", weights_only=True)["a"].tolist() == [1, 1, 1]
    assert names(tmp_path) == ["best.pt"]


def test_weights_are_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "last.pt"
    checkpoint_files.save_weights(path, {"a": torch.zeros(3)})
    assert killed_at(1, lambda: checkpoint_files.save_weights(path, {"a": torch.ones(3)})) == -signal.SIGKILL
    assert torch.load(path, weights_only=True)["a"].tolist() == [0, 0, 0]
    assert Checkpoints(tmp_path, Place()).last() is None
    assert names(tmp_path) == ["last.pt"]


def test_a_full_disk_is_an_oserror_and_leaves_the_checkpoints_before(small_disk):  # noqa: F811
    folder = small_disk(400 << 10)
    kept = kept_in(folder, 1, 2)
    for is_sharded in (False, True):
        big = {"model": {"weight": torch.zeros(1 << 20)}}
        with pytest.raises(OSError) as caught:
            kept.save(3, shared={} if is_sharded else big, own={}, sharded=big if is_sharded else None)
        assert caught.value.errno == errno.ENOSPC
        assert names(folder) == ["step-0000000001", "step-0000000002"]
        check_last(kept, 2)


def test_two_that_train_the_same_at_once_do_not_disturb_each_other(tmp_path):
    outcomes = []

    def write():
        outcomes.append(in_a_child(lambda: kept_in(tmp_path, *range(1, 31))))

    writers = [threading.Thread(target=write) for _ in range(3)]
    for each in writers:
        each.start()
    for each in writers:
        each.join()
    assert outcomes == [0, 0, 0]
    assert names(tmp_path) == ["step-0000000029", "step-0000000030"]
    check_last(Checkpoints(tmp_path, Place()), 30)


def test_a_writer_whose_folder_another_removed_goes_on(tmp_path, monkeypatch, caplog):
    kept = kept_in(tmp_path, 1)
    write = checkpoints.write_state

    def meanwhile(path, state):
        kept.last()
        return write(path, state)

    monkeypatch.setattr(checkpoints, "write_state", meanwhile)
    save(kept, 2)
    assert "another process" in caplog.text
    assert kept.steps() == [1]


# What a training is made of


def draw():
    return random.random(), np.random.rand(), np.random.randn(), torch.rand(1).item(), torch.randn(1).item()


def test_the_random_numbers_go_on(tmp_path):
    before = states.random_state(CPU)
    states.seed_everything(2**64 - 3)
    first = draw()
    kept = Checkpoints(tmp_path, Place())
    kept.save(1, shared={}, own={"random": states.random_state(CPU)})
    second = draw()
    states.seed_everything(2**64 - 3)
    assert draw() == first
    states.set_random_state(kept.last().own()["random"], CPU)
    assert draw() == second
    states.set_random_state(before, CPU)


class Tied(nn.Module):
    """A head that is the embedding's; with extra state, and a buffer that no state_dict has."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(6, 5)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mean", torch.zeros(5), persistent=False)
        self.calls = 0

    def forward(self, inputs):
        self.calls += 1
        hidden = self.norm(self.embedding(inputs) + self.mean)
        self.mean.lerp_(hidden.detach().mean(0), 0.1)
        return self.head(hidden)

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


class PreciseSGD(torch.optim.Optimizer):
    """Its moments are of fp32, whatever the parameters are."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                moment = self.state[parameter].setdefault("moment", torch.zeros(parameter.shape))
                moment.mul_(0.9).add_(parameter.grad.float())
                parameter.data.sub_(moment.bfloat16(), alpha=group["lr"])


OPTIMIZERS = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, fused=True),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "momentum": lambda model: torch.optim.SGD(
        [{"params": model.norm.parameters(), "lr": 0.3}, {"params": model.head.parameters()}], lr=0.1, momentum=0.9
    ),
    "precise": lambda model: PreciseSGD(model.bfloat16().parameters()),
}


def few_steps(model, optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(3):
        inputs = torch.randint(0, 6, (8,), generator=generator)
        nn.functional.cross_entropy(model(inputs), inputs).backward()
        optimizer.step()
        optimizer.zero_grad()


def exact(model, optimizer):
    found = {**dict(model.named_parameters()), **states.buffers(model)}
    for number, moments in optimizer.state_dict()["state"].items():
        found |= {f"{number}.{name}": each for name, each in moments.items() if each is not None}
    return {name: (each.dtype, each.tolist()) for name, each in found.items()}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("wrap", [lambda model: model, torch.compile], ids=["plain", "compiled"])
def test_model_and_optimizer_come_back_bit_for_bit(tmp_path, make, wrap):
    kept = Checkpoints(tmp_path, Place())
    inner = Tied()
    model, optimizer = wrap(inner), make(inner)
    few_steps(inner, optimizer, 0)
    state = states.model_state(model, optimizer, sharded=False)
    kept.save(3, shared=state, own={"buffers": states.buffers(model)})
    few_steps(inner, optimizer, 1)

    again = Tied()
    model, other = wrap(again), make(again)
    last = kept.last()
    states.load_model_state(model, other, last.shared(), sharded=False)
    states.load_buffers(model, last.own()["buffers"])
    few_steps(again, other, 1)
    assert exact(again, other) == exact(inner, optimizer)
    assert again.calls == inner.calls == 6
    assert again.head.weight is again.embedding.weight


def test_weights_have_the_users_names_and_are_whole(tmp_path):
    model = nn.Sequential(torch.compile(nn.Linear(2, 2)), Tied())
    path = tmp_path / "folder" / "best.pt"
    checkpoint_files.save_weights(path, states.weights(torch.compile(model), sharded=False))
    found = torch.load(path, weights_only=True)
    assert sorted(found) == sorted(nn.Sequential(nn.Linear(2, 2), Tied()).state_dict())
    nn.Sequential(nn.Linear(2, 2), Tied()).load_state_dict(found)
    tied = [found[f"1.{name}.weight"].untyped_storage().data_ptr() for name in ("embedding", "head")]
    assert tied[0] == tied[1]


def test_a_checkpoint_of_another_model_is_refused():
    small, large = nn.Linear(2, 2), nn.Linear(2, 3)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (small, large)]
    state = states.model_state(small, optimizers[0], sharded=False)
    with pytest.raises(checkpoint_files.CheckpointMismatchError, match="does not fit the model or optimizer") as found:
        states.load_model_state(large, optimizers[1], state, sharded=False)
    assert "as a new run" in found.value.advice


def test_a_state_is_read_by_pages_of_the_file_which_nothing_keeps(tmp_path):
    model = nn.Linear(1024, 512)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    kept = Checkpoints(tmp_path, Place())
    kept.save(1, shared=states.model_state(model, optimizer, sharded=False), own={})
    state = kept.last().shared()
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    states.load_model_state(model, optimizer, state, sharded=False)
    del state
    gc.collect()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


# Several ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, slurmgpu):
    """A folder and a function: what a case gave on each of two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    slurmgpu.module("tests.support.checkpoint_ranks", folder, "plain", "damaged", "ddp", "fsdp")
    return folder, lambda case: [json.loads((folder / f"{case}-{rank}.json").read_text()) for rank in range(2)]


def test_each_rank_gets_its_own_state_back_and_all_what_they_share(ranks):
    found = ranks[1]("plain")
    assert [each["own"] for each in found] == [0, 1]
    assert [each["shared"] for each in found] == [{"step": 2}] * 2
    assert all(each["same_number"] for each in found)


def test_what_one_rank_cannot_write_is_an_error_on_all_and_costs_no_checkpoint(ranks):
    for found in ranks[1]("plain"):
        assert found["errno"] == errno.ENOSPC
        assert "cannot be saved in a checkpoint" in found["refused"]
        assert found["steps"] == [1, 2]
        assert found["left"] == ["step-0000000001", "step-0000000002"]


def test_damage_that_one_rank_finds_is_damage_for_all(ranks):
    assert ranks[1]("damaged") == [{"step": 1, "steps": [1]}] * 2


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_model_on_several_ranks_goes_on_bit_for_bit(ranks, strategy):
    found = ranks[1](strategy)
    assert all(each["is_equal"] for each in found)
    assert found[0]["shared_buffers"] == found[1]["shared_buffers"]
    assert found[0]["values"]["1.running_mean"] != found[1]["values"]["1.running_mean"]


def test_fsdp_has_the_weights_that_ddp_has(ranks):
    whole = {strategy: ranks[1](strategy)[0]["weights"] for strategy in ("ddp", "fsdp")}
    assert sorted(whole["ddp"]) == sorted(whole["fsdp"]) == sorted(checkpoint_ranks.make_model().state_dict())
    for name, value in whole["ddp"].items():
        assert np.allclose(value, whole["fsdp"][name], atol=1e-6), name
    assert [ranks[1](strategy)[1]["weights"] for strategy in ("ddp", "fsdp")] == [{}, {}]


def test_a_checkpoint_of_two_ranks_loads_on_one(ranks, caplog):
    folder, found = ranks
    for strategy in ("ddp", "fsdp"):
        last = Checkpoints(folder / strategy, Place()).last()
        assert last.world_size == 2
        assert last.own() is None
        model = checkpoint_ranks.make_model()
        optimizer = torch.optim.AdamW(model.parameters())
        state = states.model_state(model, optimizer, sharded=strategy == "fsdp")
        if strategy == "fsdp":
            last.load_sharded(state)
        else:
            state = last.shared()
        states.load_model_state(model, optimizer, state, sharded=strategy == "fsdp")
        assert optimizer.param_groups[0]["lr"] == 0.1
        assert float(optimizer.state[model[0].weight]["step"]) == 3
        weights = found(strategy)[0]["weights"]
        assert {name: value.tolist() for name, value in model.state_dict().items() if "running" not in name} == {
            name: value for name, value in weights.items() if "running" not in name
        }


def test_a_damaged_part_of_a_sharded_state_is_noticed(ranks, tmp_path, caplog):
    parts = [path.name for path in (ranks[0] / "fsdp" / "step-0000000003" / "sharded").iterdir()]
    assert sorted(parts) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    for part in parts:
        folder = tmp_path / part.strip("._")
        shutil.copytree(ranks[0] / "fsdp", folder)
        flipped(folder / "step-0000000003" / "sharded" / part)
        with caplog.at_level(logging.WARNING):
            assert Checkpoints(folder, Place()).last() is None
        assert f"the CRC of sharded/{part} differs" in caplog.text


class Calling:
    """What calls a function where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


def sharded_state(lr=0.1):
    from slurmgpu.training import sharded_states

    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    return sharded_states.state(model, optimizer)


@pytest.mark.parametrize("place", ["metadata", "value"])
def test_a_sharded_state_that_a_colleague_has_written_calls_nothing(tmp_path, monkeypatch, place):
    from slurmgpu.training import sharded_states

    state = sharded_state()
    written = {**state, "model": {**state["model"], "odd": Calling(tmp_path / "called")}} if place == "value" else state
    with monkeypatch.context() as unchecked:
        unchecked.setattr(sharded_states, "plain_state", dict)
        sharded_states.write(tmp_path / "state", written, 0)
    sharded_states.read(tmp_path / "state", sharded_state())
    if place == "metadata":
        (tmp_path / "state" / ".metadata").write_bytes(pickle.dumps(Calling(tmp_path / "called")))
    else:
        state["model"]["odd"] = "a value"
    with pytest.raises(SlurmGPUError, match=r"posix\.mkdir|[Ww]eights.only"):
        sharded_states.read(tmp_path / "state", state)
    assert not (tmp_path / "called").exists()


def test_a_sharded_state_that_python_3_11_0_has_written_is_read(tmp_path, monkeypatch):
    """It pickles a member of an Enum as a call of getattr, and metadata has one for each tensor."""
    from torch.distributed.checkpoint import metadata

    from slurmgpu.training import sharded_states

    by_name = lambda self, protocol: (getattr, (type(self), self.name))  # noqa: E731
    with monkeypatch.context() as former:
        former.setattr(metadata._MEM_FORMAT_ENCODING, "__reduce_ex__", by_name)
        sharded_states.write(tmp_path / "state", sharded_state(lr=0.5), 0)
    assert b"getattr" in (tmp_path / "state" / ".metadata").read_bytes()
    state = sharded_state()
    sharded_states.read(tmp_path / "state", state)
    assert state["optimizer"]["param_groups"][0]["lr"] == 0.5


def test_a_sharded_state_that_python_3_13_has_written_is_read(tmp_path, monkeypatch):
    """Its paths are of a module that other versions lack, and metadata has the checkpoint's path."""
    from slurmgpu.training import sharded_states

    with monkeypatch.context() as written:
        written.setitem(sys.modules, "pathlib._local", pathlib)
        written.setattr(type(tmp_path), "__module__", "pathlib._local")
        sharded_states.write(tmp_path / "state", sharded_state(lr=0.5), 0)
    assert b"pathlib._local" in (tmp_path / "state" / ".metadata").read_bytes()
    state = sharded_state()
    sharded_states.read(tmp_path / "state", state)
    assert state["optimizer"]["param_groups"][0]["lr"] == 0.5


def test_metadata_gets_no_other_attribute_than_members_of_enums(tmp_path):
    from torch.distributed.checkpoint import metadata

    from slurmgpu.training import sharded_states

    class Getting:
        def __reduce__(self):
            return getattr, (metadata.TensorProperties, "__init__")

    sharded_states.write(tmp_path / "state", sharded_state(), 0)
    (tmp_path / "state" / ".metadata").write_bytes(pickle.dumps(Getting()))
    with pytest.raises(SlurmGPUError, match="does not fit"):
        sharded_states.read(tmp_path / "state", sharded_state())


def test_a_sharded_state_has_pythons_numbers_for_numpys(tmp_path):
    from slurmgpu.training import sharded_states

    sharded_states.write(tmp_path / "state", sharded_state(lr=np.float64(0.5)), 0)
    state = sharded_state()
    sharded_states.read(tmp_path / "state", state)
    assert state["optimizer"]["param_groups"][0]["lr"] == 0.5


def test_a_sharded_state_that_could_not_be_read_back_is_refused(tmp_path):
    from slurmgpu.training import sharded_states

    state = sharded_state()
    state["optimizer"]["param_groups"][0]["odd"] = object()
    with pytest.raises(SlurmGPUError, match=r"cannot be saved in a checkpoint.*state_dict"):
        sharded_states.write(tmp_path / "state", state, 0)
    assert not (tmp_path / "state").exists()
