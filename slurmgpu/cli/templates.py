"""What `init` writes."""

from __future__ import annotations

from slurmgpu.errors import SlurmGPUError, did_you_mean

SETTINGS = {
    "embed": """model = "sentence-transformers/all-MiniLM-L6-v2"   # a name on the hub, or a folder
field = "text"                                     # the field of an item that is embedded
dtype = "float16"                                  # of the column: float16 or float32
""",
}
"""Each built-in workload's settings, as `init` proposes them."""

TEMPLATE = """\
# A run file of slurmgpu; every key is in docs/reference/run-file.md.
input = "items.jsonl"              # a path, a list of paths or a glob: .jsonl, .csv, .parquet, .txt or .h5
# run_dir = "runs/{stem}"          # default: runs/<this file's stem>
# seed = 0
# shard_items = 1024               # default: from the input's size alone, never from the number of GPUs
# auto_resubmit = 2                # the merge job submits again what is missing, so often at most

[workload]
use = "{use}"
# batch_size = 64                  # overrides the workload's own

[settings]                         # what the workload's __init__ takes
{settings}
[resources]
gpus = 4                           # held at once
array = true                       # spread over tasks of one GPU; without it one task holds all of them
# device = "cpu"                   # compute on the CPU whatever is allocated

[slurm]                            # sbatch's own names, passed through
# partition = "gpu"
time = "04:00:00"
# mem = "32G"

[merge]                            # the same for the merge job, which needs no GPU
# partition = "cpu"
"""


def run_file_template(workload: str | None) -> str:
    """A commented run file for a built-in workload; without one, for a class of the user's."""
    if workload is None:
        settings = '# field = "text"\n'
        return TEMPLATE.format(stem="slurmgpu", use="my_workload.py:MyWorkload", settings=settings)
    if workload not in SETTINGS:
        raise SlurmGPUError(f"There is no built-in workload {workload!r}.{did_you_mean(workload, SETTINGS)}")
    return TEMPLATE.format(stem="slurmgpu", use=workload, settings=SETTINGS[workload])
