"""One of two processes of a training: `torchrun -m tests.support.speed_ranks FOLDER`.

Rank 1 delays its gradients by LATE_S, and has less memory. Each writes its results as rank<R>.json.
"""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
from torch import distributed, nn

from slurmgpu import find_batch_size, throughput

N_STEPS = 14
LATE_S = 0.3


def train(model, meter, rank, n_steps):
    for _ in range(n_steps):
        with meter.step(samples=3 + rank, tokens=10):
            loss = model(torch.ones(2, 8)).mean()
            if rank == 1:
                time.sleep(LATE_S)
            loss.backward()


def fitting(rank):
    """The batch size that fits both; then one try whose smallest size does not fit one of them."""

    def fn(size):
        if size > (40, 20)[rank]:
            raise MemoryError

    def agree(fitted):
        least = torch.tensor(float(fitted))
        distributed.all_reduce(least, distributed.ReduceOp.MIN)
        return bool(least)

    found = find_batch_size(fn, agree=agree)
    try:
        find_batch_size(fn, agree=agree, sizes=[30, 35])
    except MemoryError as error:
        return found, str(error)
    return found, None


def main(folder):
    """Train with DDP, and with a model of which nothing tells what it waits for."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    meter, other = throughput(ddp), throughput(nn.Linear(8, 8))
    train(ddp, meter, rank, N_STEPS)
    train(ddp, other, rank, 2)
    found = {
        "own": asdict(meter.summary()),
        "together": asdict(meter.summary(together=True)),
        "unknown": asdict(other.summary(together=True)),
        "state": meter.state(together=True),
        "fitting": fitting(rank),
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
