"""Two ranks that write and read checkpoints, for tests/models/test_training_checkpoints.py.

`python -m tests.support.checkpoint_ranks FOLDER CASE…` writes what each case gave on a rank to
FOLDER/<case>-<rank>.json.
"""

import errno
import json
import logging
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from slurmgpu.errors import SlurmGPUError
from slurmgpu.training import checkpoints, states
from slurmgpu.training.checkpoints import Checkpoints
from slurmgpu.training.ranks import Place
from tests.support.forks import fork_ranks

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:
    from torch.distributed._composable.fsdp import fully_shard

WORLD_SIZE = 2


def make_model():
    """A small network with several difficulties: running statistics, a frozen layer, an odd size."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 7), nn.Linear(7, 3, bias=False))
    model[2].requires_grad_(False)
    model[1].register_buffer("seen", torch.zeros(2), persistent=False)
    return model


def batch(step, rank):
    """Samples of one rank at a step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 5, generator=generator) + rank


def train(model, optimizer, steps, rank):
    """Some steps of a training."""
    for step in steps:
        model(batch(step, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        states.unwrapped(model)[1].seen += rank + step


def sharded(model, world_size):
    """The model, its parameters spread over the ranks."""
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def values(model, optimizer):
    """What must be equal, bit for bit: as lists of numbers, which are exact in JSON."""
    found = {**dict(model.named_parameters()), **states.buffers(model)}
    for number, moments in optimizer.state_dict()["state"].items():
        found.update({f"{number}.{name}": value for name, value in moments.items()})
    return {name: local(value).double().tolist() for name, value in found.items()}


def local(value):
    """This rank's part of a tensor."""
    return (value.to_local() if hasattr(value, "to_local") else value).detach()


def plain(folder, place):
    """Each rank's own state and the shared one; and the outcome of a step that one rank cannot write."""
    kept = Checkpoints(folder, place)
    device = torch.device("cpu")
    for step in (1, 2):
        states.seed_everything(10 * step + place.rank)
        kept.save(step, shared={"step": step}, own={"rank": place.rank, "random": states.random_state(device)})
    number = torch.rand(1).item()
    write, failed = checkpoints.write_state, None

    def full(path, state):
        if place.rank == place.world_size - 1:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(path, state)

    checkpoints.write_state = full
    try:
        kept.save(3, shared={}, own={})
    except OSError as error:
        failed = error.errno
    checkpoints.write_state = write
    refused = ""
    try:
        kept.save(3, shared={"odd": object()}, own={})
    except SlurmGPUError as error:
        refused = str(error)
    last = kept.last()
    states.set_random_state(last.own()["random"], device)
    return {
        "shared": last.shared(),
        "own": last.own()["rank"],
        "same_number": torch.rand(1).item() == number,
        "errno": failed,
        "refused": refused,
        "steps": kept.steps(),
        "left": sorted(path.name for path in folder.iterdir()),
    }


def damaged(folder, place):
    """Only one rank's file of the newest is damaged."""
    kept = Checkpoints(folder, place)
    for step in (1, 2):
        kept.save(step, shared={"step": step}, own={"rank": place.rank})
    if place.is_rank_zero:
        (folder / "step-0000000002" / f"rank-{place.world_size - 1}.pt").write_bytes(b"")
    dist.barrier()
    return {"step": kept.last().step, "steps": kept.steps()}


def ddp(folder, place):
    """A training with DDP that is resumed, with the names that the user's model has."""
    return resumed(folder, place, nn.parallel.DistributedDataParallel, is_sharded=False)


def fsdp(folder, place):
    """A training with FSDP that is resumed; its weights are whole on rank 0."""
    return resumed(folder, place, lambda model: sharded(model, place.world_size), is_sharded=True)


def resumed(folder, place, wrap, *, is_sharded):
    """Whether a resumed training ends like an uninterrupted one."""
    kept = Checkpoints(folder, place)
    model = wrap(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, range(3), place.rank)
    state, own = states.model_state(model, optimizer, sharded=is_sharded), {"buffers": states.buffers(model)}
    if is_sharded:
        kept.save(3, shared={}, own=own, sharded=state)
    else:
        kept.save(3, shared=state, own=own)
    whole = {name: value.tolist() for name, value in states.weights(model, sharded=is_sharded).items()}
    train(model, optimizer, range(3, 6), place.rank)
    undisturbed = values(model, optimizer)

    model = wrap(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    last = kept.last()
    if is_sharded:
        into = states.model_state(model, optimizer, sharded=True)
        last.load_sharded(into)
    else:
        into = last.shared()
    states.load_model_state(model, optimizer, into, sharded=is_sharded)
    states.load_buffers(model, last.own()["buffers"])
    train(model, optimizer, range(3, 6), place.rank)
    found = values(model, optimizer)
    states.share_buffers(model)
    return {
        "values": found,
        "is_equal": found == undisturbed,
        "weights": whole,
        "shared_buffers": {name: value.tolist() for name, value in states.buffers(model).items()},
    }


def run_all(folder, cases, rank):
    """Run the cases as one rank of a group."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=WORLD_SIZE)
    place = Place("cpu", rank, WORLD_SIZE, rank)
    for case in cases:
        found = globals()[case](folder / case, place)
        (folder / f"{case}-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    fork_ranks(WORLD_SIZE, run_all, Path(sys.argv[1]), sys.argv[2:])
