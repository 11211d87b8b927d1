"""What `init` writes: a commented run file, or the site file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slurmgpu.cli.console import result
from slurmgpu.containers.registry import DEFAULT, runtime_named
from slurmgpu.errors import SlurmGPUError
from slurmgpu.plan.site_file import site_path
from slurmgpu.slurm.survey import Survey, survey
from slurmgpu.workload import Translated, load_class, resolve_use, template_of

_NAME = """model = "meta-llama/Llama-3.1-8B-Instruct"       # a folder, or a name on the hub, and -8bit, -4bit or -fp8
"""

_SAMPLING = """# max_tokens = 512                               # the longest answer
# temperature = 0.0                              # 0 is greedy; with more, answers are sampled, by the run's seed
# top_p = 1.0
# stop = ["\\n\\n"]                                # texts that end an answer
"""

_MODEL = """# precision = "bf16"                             # or "fp16", "fp32"
# engine = "transformers"                        # or "vllm", in an image that has it
"""

SETTINGS = {
    "generate": _NAME
    + """prompt = "Summarize in one sentence:\\n\\n{text}"  # fields of an item; "file:prompt.txt" for a longer one
# messages = "messages"                          # instead of prompt: the field with a chat
# system = "You are a careful editor."
# n = 1                                          # answers to each item; more than one needs a temperature
# keep = ["id"]                                  # fields of the input that become columns
"""
    + _SAMPLING
    + _MODEL,
    "classify": _NAME
    + """# The prompt: fields of an item, and {labels}.
prompt = '''
Which of these is the text?
{labels}

Text: {text}

Answer with the label alone.'''
method = "score"                                 # by the labels' probabilities; "parse": by what a free answer says
# calibrate = true                               # score: take away what the model prefers without any item
# pattern = "Label: (.*)"                        # parse: where the answer has the label
# truth = "label"                                # the field with the true label: then the report has metrics
# group = "source"                               # … for each value of this field
"""
    + _MODEL
    + """
[settings.labels]                                # or above: labels = ["hate", "ok"]
hate = "attacks people for what they are"
ok = "anything else"
""",
    "judge": _NAME
    + """rubric = "correctness"                           # or "pairwise", "rating", "yes-no", or "my-rubric.toml"
# fields = {reference = "answer"}                # what the rubric calls a field = what the items call it
# against = "runs/other/merged.h5"               # pairwise: the run whose texts are compared with the input's
# retries = 2                                    # times that an answer without a verdict is asked for again
# truth = "right"                                # a field with a verdict, to see how far the judge agrees with it
# keep = ["question"]                            # fields of the input that become columns
"""
    + _MODEL,
    "collect": _NAME
    + """prompt = "{question}\\nReason step by step, a step in each line, and end with #### and the number."
reference = "answer"                             # the field with the right answer
checker = "numeric"                              # or "exact", "regex" with a pattern, "rules.py:check"
paths = 8                                        # sampled for each question
rollouts = 4                                     # completions of each beginning, which tell its value
# tree = [4, 2, 2]                               # in place of both: branches at each depth
# step_delimiter = "\\n"
temperature = 1.0
# max_tokens = 512                               # a path that is longer is cut, and wrong
# keep = ["id"]                                  # fields of the input that become columns
"""
    + _MODEL,
    "embed": """model = "sentence-transformers/all-MiniLM-L6-v2"   # a name on the hub, or a folder
field = "text"                                     # the field of an item that is embedded
dtype = "float16"                                  # of the column: float16 or float32
""",
    "tracin": """train = "train.txt"                                # lines of head, relation, tail; tabs between them
entities = "node_dict.txt"                         # lines of an entity's name and its number
relations = "rel_dict.txt"                         # … and a relation's
model = "model.pt"                                 # a checkpoint, a list of them, or a glob: "checkpoints/*.pt"
# learning_rate = 0.001                            # or one for each checkpoint; default: what their optimizers say
# loss = "bce-pos"                                 # or "bce-1n", "kvsall", "ce", "ns:64", "score"
# directions = "tail"                              # "both": by the inverse relation as well
# parameters = "all"                               # or names of parameters, or of their groups: ["conv", "fc"]
# top_k = 100                                      # listed for each test triple, of either sign
# full = "float32"                                 # keep every influence as well
# n_hops = 2                                       # list only training triples that lie so near
# names = "node_name_dict.txt"                     # labels for exports
# edge_map = "edge_map.json"
""",
    "train": """training = "my_training.py:MyTraining"          # your class: model(), data(split), loss(model, batch)
epochs = 10                                      # or steps
batch_size = 32                                  # of one process; "auto": what fits
# global_batch_size = 256                        # of a step, on however many GPUs
lr = 1e-3
# optimizer = "adamw"                            # or "adam", "sgd"; or the class has a method optimizer(model)
# schedule = "cosine"                            # or "linear"; default: constant
# warmup_ratio = 0.05                            # of the training
# clip = 1.0                                     # the gradient's largest norm
# precision = "bf16"                             # or "fp16", "tf32"; default: fp32
# compile = true
# strategy = "fsdp"                              # parameters spread over the GPUs; default: DDP
# metric = "val_accuracy"                        # ranks epochs and configurations; default: val_loss
# patience = 3                                   # evaluations without a better one after which it stops
# num_workers = 4                                # processes that read the data
# checkpoint_s = 600                             # seconds between checkpoints

# [settings.arguments]                           # what the class's __init__ takes
# width = 64

# [sweep]                                        # a training for each combination; without it there is one
# lr = [1e-3, 3e-4, 1e-4]                        # settings, and arguments of the class
# width = [32, 64]
""",
}
"""Each built-in workload's settings, as `init` proposes them."""

INPUTS = {"tracin": "test.txt", "train": None}
"""Inputs that are not called items.jsonl; None where none is needed."""

RESOURCES: Mapping[str, Mapping[str, Any]] = {
    "tracin": {"gpus": 1, "array": False},
    "train": {"gpus": 4, "array": False},
}
"""Resources that are not four tasks of one GPU: one does hundreds of test triples; one training is of all GPUs."""

TEMPLATE = """\
# A run file of slurmgpu; every key is in docs/reference/run-file.md.
{input:<33}  # a path, a list of paths or a glob: .jsonl, .csv, .parquet, .txt or .h5
{run_dir:<33}  # default: runs/<this file's stem>
# seed = 0
# shard_items = 1024               # default: from the input's size alone, never from the number of GPUs
# auto_resubmit = 2                # the merge job submits again what is missing, so often at most
# on_end = "mail -s $SLURMGPU_NAME:$SLURMGPU_STATE ada@example.org"   # run when the run has ended, report.json on stdin

[workload]
use = "{use}"
{batch}
[settings]                         # what the workload's __init__ takes
{settings}
[resources]
gpus = {gpus}                           # held at once
{array:<33}  # spread over tasks of one GPU; without it one task holds all of them
# gpus_per_task = 4                # with array: GPUs of each task
# gpu_type = "a100"                # as Slurm calls it
# processes = "per-gpu"            # a process for each GPU of a task, if the workload can; default: what it wants
# nodes_per_task = 2               # spread each task over nodes; needs processes = "per-gpu"
# device = "cpu"                   # compute on the CPU whatever is allocated

# [container]                      # without it tasks run in the Python that submits
# image = "image.sif"              # an {title} image, with what the workload imports
# binds = ["/data", "/scratch/ada:/scratch"]
# env = {{HF_HOME = "/data/hf", HF_TOKEN = true}}   # true: as it is where the task starts

[slurm]                            # sbatch's own names, passed through
# partition = "gpu"
# time = "04:00:00"                # the walltime of a task; default: the site file's, else the partition's
# mem = "32G"

[merge]                            # the same for the merge job, which needs no GPU
# partition = "cpu"
"""


SITE_TEMPLATE = """\
# The site file: what holds for all of your runs on this cluster.
# Run files go over it, and options of commands over both.
# Written by `slurmgpu init --site` from what Slurm says of the cluster {cluster}.

[slurm]                            # sbatch's own names
{slurm}
[merge]                            # the merge job, which needs no GPU
{merge}
[resources]
{resources}
[container]                        # relative paths are relative to this file
# image = "/path/to/image.sif"
# binds = ["/data"]
# scratch = "{scratch}"            # a folder on each node for images and caches; default: $TMPDIR, else /tmp
"""


def write_run_file(workload: str | None, path: Path) -> Path:
    """Write a commented run file; refuse to overwrite."""
    refuse_to_overwrite(path)
    path.write_text(run_file_template(workload, path.stem), "utf-8")
    return path


def write_translated(found: Translated, path: Path) -> list[Path]:
    """Write the run file that a command line of the replaced scripts means, and its chosen items; which files."""
    items = path.with_name(f"{path.stem}.tests.jsonl")
    written = [path] if found.items is None else [path, items]
    for file in written:
        refuse_to_overwrite(file)
    if found.items is not None:
        items.write_text("".join(f"{json.dumps(item, ensure_ascii=False)}\n" for item in found.items), "utf-8")
    settings = "".join(f"{key} = {json.dumps(value)}\n" for key, value in found.settings.items())
    path.write_text(_filled("tracin", settings, path.stem, found.input, **found.resources), "utf-8")
    return written


def say_translated(arguments: str, path: Path) -> None:
    """Write the run file that the arguments of a replaced script mean, and say of each what became of it."""
    replaced: Any = load_class(resolve_use("tracin", path.parent), path.parent)
    found: Translated = replaced.from_args(arguments, path.parent, path.stem)
    written = write_translated(found, path)
    width = max(len(flag) for flag, _ in found.lines)
    for flag, said in found.lines:
        result(f"{flag:<{width}}  {said}")
    result(f"{' and '.join(map(str, written))}: written. Look at it, then: slurmgpu submit {path} --dry-run")


def refuse_to_overwrite(path: Path) -> None:
    """Nothing, unless there is such a file."""
    if path.exists():
        raise SlurmGPUError(f"{path} exists; name another file with -o, or remove it.")


def write_site_file(path: Path | None) -> Path:
    """Write the site file, by default where every run looks for it; refuse to overwrite."""
    path = path or site_path()
    if path.exists():
        raise SlurmGPUError(f"{path} exists; edit it, or see with -o FILE what would be proposed today.")
    text = site_file_template(survey())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    return path


def site_file_template(found: Survey) -> str:
    """A commented site file: what to take, with the alternatives in comments."""
    with_gpus = [(p.name, p.described) for p in found.gpu_partitions]
    without = [(p.name, p.described) for p in found.partitions if not p.gpus]
    account = [(name, "the default one" if n == 0 else "") for n, name in enumerate(found.accounts)]
    # None is taken: a run that does not care starts sooner.
    types = _choices("gpu_type", [(name, "") for name in found.gpu_types], n_taken=0)
    slurm = _choices("partition", with_gpus) + _choices("account", account)
    slurm += _choices("qos", [(name, "") for name in found.qos], n_taken=0)
    slurm += '# time = "04:00:00"\n# setup = ["module load ' + DEFAULT + "\"]   # what a job's script runs first\n"
    return SITE_TEMPLATE.format(
        cluster=found.cluster,
        slurm=slurm if with_gpus else f"# No partition has GPUs.\n{slurm}",
        merge=_choices("partition", without) or "# partition, account, qos and reservation are those of [slurm]\n",
        resources=types or '# gpu_type = "a100"\n',
        scratch=found.scratch,
    )


def _choices(key: str, values: Sequence[tuple[str, str]], n_taken: int = 1) -> str:
    """A line for each value, the first ones as they are and the others in comments, with a word on each."""
    lines = []
    for n, (value, word) in enumerate(values):
        text = f'{"" if n < n_taken else "# "}{key} = "{value}"'
        lines.append(f"{text:<34} # {word}\n" if word else f"{text}\n")
    return "".join(lines)


def run_file_template(workload: str | None, stem: str = "slurmgpu") -> str:
    """A commented run file for a built-in workload; without one, for a class of the user's."""
    if workload is None:
        return _filled("my_workload.py:MyWorkload", '# field = "text"\n', stem)
    if workload not in SETTINGS:
        return _filled(workload, template_of(workload, Path.cwd()), stem)
    input_path, resources = INPUTS.get(workload, "items.jsonl"), RESOURCES.get(workload, {})
    return _filled(workload, SETTINGS[workload], stem, input_path, **resources)


def _filled(
    use: str, settings: str, stem: str, input_path: str | None = "items.jsonl", gpus: int = 4, array: bool = True
) -> str:
    return TEMPLATE.format(
        title=runtime_named(DEFAULT).title,
        run_dir=f'# run_dir = "runs/{stem}"',
        use=use,
        settings=settings,
        input=f"input = {json.dumps(input_path)}" if input_path else '# input = "items.jsonl"',
        batch="# batch_size = 64                  # overrides the workload's own\n" if input_path else "",
        gpus=gpus,
        array="array = true" if array else "# array = true",
    )
