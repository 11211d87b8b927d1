"""`run`: submits a command for each item of an input, without a run file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from slurmgpu.cli import options
from slurmgpu.code.started_modules import module_of, modules_in
from slurmgpu.errors import SlurmGPUError
from slurmgpu.util.amounts import count_of
from slurmgpu.util.json_values import is_utf8

if TYPE_CHECKING:
    from slurmgpu.plan.overrides import Overrides

USAGE = "--each FILE --col NAME:TYPE [OPTIONS] -- PROGRAM [ARGUMENTS]"
PROGRAM = "slurmgpu.program"
"""The key of the program in Click's context."""
SCRIPTS = (".py", ".sh", ".R", ".jl", ".pl", ".js")


class WithProgram(TyperCommand):
    """A command whose options are followed by `--` and a program with its arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep the program for `run`, and read what comes before it as options."""
        if "--" in args:
            place = args.index("--")
            args, ctx.meta[PROGRAM] = args[:place], args[place + 1 :]
        elif not ctx.resilient_parsing and not {"-h", "--help"} & set(args):
            raise SlurmGPUError(f"-- is missing between the options and the program: slurmgpu run {USAGE}")
        ctx.allow_extra_args = True
        left: list[str] = super().parse_args(ctx, args)
        if left and not ctx.resilient_parsing:
            _refuse_words(left)
        return left


def _refuse_words(words: Sequence[str]) -> None:
    first = Path(words[0])
    quoted = f"--each '{first.parent / '*'}{first.suffix}'" if first.suffix else "--each 'images/*.png'"
    raise SlurmGPUError(
        f"{count_of(len(words), 'word')} before -- {'belongs' if len(words) == 1 else 'belong'} to no option, such as "
        f"{words[0]!r}. If the shell has expanded a glob, quote it: {quoted}. The program comes after --."
    )


@options.taking({**options.PLACES, **options.KEYS, **options.SUBMITTING})
def run(
    context: typer.Context,
    each: Annotated[
        list[str] | None,
        typer.Option(
            "--each", metavar="FILE", help="The input: a file, a folder of files, or a quoted glob; may be repeated."
        ),
    ] = None,
    col: Annotated[
        list[str] | None,
        typer.Option(
            "--col",
            metavar="NAME:TYPE",
            help="A column of the results: a key of what the program writes. Types: text, json, bool, int64, float32 "
            "and NumPy's others, float32[384] (an array), float32[] (of any length).",
        ),
    ] = None,
    keep: Annotated[
        str | None, typer.Option("--keep", metavar="A,B", help="Fields of the items to keep as columns of the rows.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option("--batch-size", help="The most items in a slice.")] = None,
    **given: Any,
) -> None:
    """Submit a command for the items of an input, without a run file.

    \b
      slurmgpu run --each clips.jsonl --col text:text --gpus 4 --array \\
        -- python transcribe.py {audio}
      slurmgpu run --each a.jsonl --col n:int64 -- python count.py {in} {out}
      slurmgpu run -s 'sweep.lr=[0.1, 0.01]' --keep lr --col loss:float32 \\
        -- python train.py --lr {lr}

    {text} is a field of an item. {in} is a file with a line {"index": …, "seed": …, "data": ITEM} for each item of a
    slice; the program writes a line {"index": …, COLUMN: VALUE} for each item to {out}. If the program reads the
    fields as JSON lines, a list or a table, and writes them back with the columns, use {in:jsonl}, {in:json},
    {in:csv} or {in:parquet}, which has the index with the fields. If its rows have a field of their item instead of
    the index, name that field with --set match=FIELD; if they are as many as the items, in their order, --set
    in_order=true.
    """
    from slurmgpu.cli.commands import submit as submitting
    from slurmgpu.cli.console import result, say
    from slurmgpu.run.frozen_plan import NO_RUN_FILE

    if not each and not any(re.match(r"(sweep|input)\b", text) for text in given["settings"] or ()):
        raise SlurmGPUError(
            "--each FILE is missing: the input, for each item of which the program runs. For a training script it can "
            "be a CSV file with one configuration per record: lr,name in its first line, then 1e-3,first and so on. Or "
            "give a grid instead: -s 'sweep.lr=[1e-2, 1e-3]' -s 'sweep.seed=[0, 1]'."
        )
    kept = options.names(keep)
    overrides = whole_run_file(each or (), col or (), context.meta[PROGRAM], given, batch_size, kept)
    if given["dry_run"] and not given["as_json"]:
        result(as_toml(overrides))
    asked = {name: given[name] for name in options.SUBMITTING}
    earlier = None if given["run_dir"] is not None else _earlier(overrides["run_dir"], context.meta[PROGRAM])
    varied = _varied(overrides)
    named = set(re.findall(r"\{([^{}:]+)", " ".join(context.meta[PROGRAM])))
    has_input, is_fed = "input" in overrides, "in" in named or "stream" in overrides["settings"]
    if not has_input and not is_fed and (unused := [key for key in varied if key not in named]):
        say(
            f"sweep.{unused[0]} is in no argument of the program, so each of its values repeats the same call. To pass "
            f"the value, write {{{unused[0]}}} after --."
        )
    try:
        code = submitting.submit(Path.cwd() / NO_RUN_FILE, overrides, earlier=earlier, **asked)
    except SlurmGPUError as error:
        if has_input and (key := next((key for key in varied if key in named and repr(key) in str(error)), None)):
            raise SlurmGPUError(
                f"{error} With --each, a sweep varies settings: to make a run for each value of {{{key}}}, write "
                f"-s 'sweep.values.{key}=[…]'; without --each, each value is an item."
            ) from error
        raise
    raise typer.Exit(code)


def _varied(overrides: Overrides) -> list[str]:
    """The keys of a sweep that are fields of its items, where no input has these."""
    from slurmgpu.plan.overrides import TABLES

    return [key for key in overrides.get("sweep", {}) if key not in {*TABLES, "input", "values", "random", "zip"}]


def whole_run_file(
    each: Sequence[str],
    col: Sequence[str],
    program: Sequence[str],
    given: Mapping[str, Any],
    batch_size: int | None = None,
    keep: Sequence[str] = (),
) -> Overrides:
    """The tables of a run file that runs `program` for the items of `each`; options that were `given` override them."""
    from slurmgpu.plan.overrides import Overrides

    if odd := [text for text in program if not is_utf8(text)]:
        raise SlurmGPUError(f"The argument {odd[0]!r} is not UTF-8, so a plan cannot hold it. Pass it in a file.")
    tables = Overrides()
    if each:
        tables.put({"input": each[0] if len(each) == 1 else list(each)}, "--each")
    if keep:
        tables.put({"keep": list(keep)}, "--keep")
    tables["run_dir"] = str(given.get("run_dir") or _free(Path("runs", _name_of(program)), given))
    tables.put({"workload": {"use": "command"}, "settings": {"run": list(program)}}, "-- PROGRAM")
    tables.put({"workload": {"batch_size": batch_size}})
    tables.put({"settings": {"columns": _columns(col)}}, "--col")
    return options.overrides(given, tables)


def _name_of(program: Sequence[str]) -> str:
    """The name of a run: the script's, also in the code of `bash -c`; else that of the module after -m."""
    words = [word.strip("'\";") for text in program for word in text.split()]
    if script := next(filter(_is_script, words), None):
        return Path(script).stem
    texts = dict(enumerate(words))
    if module := module_of(texts) or next(modules_in(texts), None):
        return module[1].rpartition(".")[2]
    return Path(*program[:1]).stem or "run"


def _free(run_dir: Path, given: Mapping[str, Any]) -> Path:
    """The run directory named after the program, or the next free name, as `slurmgpu.map` chooses it.

    A look has its own directory, which the next look replaces; the folder of a sweep is reused.
    """
    from slurmgpu.run.creation import free_run_dir
    from slurmgpu.util.shared_files import exists

    is_look = given.get("limit") is not None or given.get("items") is not None
    return run_dir if is_look or not exists(run_dir / "run.json") else free_run_dir(run_dir.parent, run_dir.name)


def _earlier(run_dir: str, program: Sequence[str]) -> Path | None:
    """The last run by the program's name, if `run_dir` is the next that is free."""
    from slurmgpu.operations.earlier_run import earlier_run_dir
    from slurmgpu.run.creation import free_run_dir

    name = _name_of(program)
    is_next = Path(run_dir) == free_run_dir(Path("runs"), name)
    return earlier_run_dir(Path(run_dir), name) if is_next else None


def _columns(texts: Sequence[str]) -> dict[str, str]:
    from slurmgpu.shards.column_types import WORDS  # NumPy

    if not texts:
        raise SlurmGPUError(
            "--col NAME:TYPE is missing: give one for each key to keep from what the program prints or writes to "
            f"{{out}}, such as --col label:text --col score:float32. The types are {', '.join(WORDS)}, float32[384] "
            "for an array, and float32[] for one of any length."
        )
    columns: dict[str, str] = {}
    for text in texts:
        name, colon, kind = text.partition(":")
        if not (name and colon and kind):
            raise SlurmGPUError(f"--col {text!r} is not of the form NAME:TYPE, such as text:text or emb:float32[384].")
        if name in columns:
            raise SlurmGPUError(f"--col names the column {name!r} twice. Leave one out.")
        columns[name] = kind
    return columns


def as_toml(tables: Mapping[str, Any]) -> str:
    """A run file; what is None, and tables with nothing in them, are left out."""
    top = [f"{key} = {_value(value)}" for key, value in tables.items() if not isinstance(value, Mapping)]
    blocks = ["\n".join(top)]
    for key in ("workload", "settings", "sweep", "resources", "container", "slurm", "merge", "track"):
        given = {name: value for name, value in tables.get(key, {}).items() if value is not None}
        if given:
            blocks.append("\n".join([f"[{key}]", *_lines(given)]))
    return "\n\n".join(blocks) + "\n"


def _lines(table: Mapping[str, Any]) -> Iterator[str]:
    return (f"{_key(name)} = {_value(value)}" for name, value in table.items())


def _key(name: str) -> str:
    is_bare = name.isascii() and name.replace("_", "").replace("-", "").isalnum()
    return name if is_bare else _value(name)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(_lines(value)) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_value, value)) + "]"
    # JSON's scalars are valid TOML, except that TOML also escapes DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _is_script(text: str) -> bool:
    """Whether a word is the path of a script, and not an option, a placeholder, a pattern or a shell's variable."""
    return text.endswith(SCRIPTS) and re.fullmatch(r"[^-{}*?$()|<>&=][^{}*?$()|<>&]*", text) is not None
