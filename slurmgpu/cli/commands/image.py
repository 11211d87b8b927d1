"""`slurmgpu image`: build an image, and check one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slurmgpu.cli.lazy_commands import Commands
from slurmgpu.errors import SlurmGPUError

if TYPE_CHECKING:
    from slurmgpu.containers.settings import Bind

image_app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help=(
        "Build the image that workers run in, and check one.\n\n"
        "\b\n"
        "  slurmgpu image build -o slurmgpu.sif       for GPUs, with PyTorch\n"
        "  slurmgpu image build --cpu -o small.sif    for CPUs\n"
        "  slurmgpu image build --vllm -o vllm.sif    for GPUs, with vLLM\n"
        "  slurmgpu image check slurmgpu.sif --gpu    does it work on this machine?\n"
    ),
)

BindOption = Annotated[
    list[str] | None, typer.Option("--bind", metavar="SRC[:DST[:ro]]", help="Mount a path into it; may be repeated.")
]
PythonOption = Annotated[str, typer.Option("--python", help="The Python in the image.")]


@image_app.command()
def build(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="IMAGE", help="The file to make.")],
    cpu: Annotated[bool, typer.Option("--cpu", help="The small image, without PyTorch.")] = False,
    vllm: Annotated[bool, typer.Option("--vllm", help='The image for engine = "vllm".')] = False,
    base: Annotated[str | None, typer.Option("--base", help="The base image: a file, or a name in a registry.")] = None,
    build_arg: Annotated[
        list[str] | None, typer.Option("--build-arg", metavar="NAME=VALUE", help="A build argument; may be repeated.")
    ] = None,
    bind: BindOption = None,
    python: PythonOption = "python3",
) -> None:
    """Build an image with Apptainer, and check it.

    An existing file is not overwritten; IMAGE appears once it is complete. A base with a digest
    (pytorch/pytorch@sha256:…) makes builds repeatable.
    """
    from slurmgpu.cli.console import say
    from slurmgpu.containers.image_build import build_image

    if cpu and vllm:
        raise SlurmGPUError("--cpu and --vllm name two images; give only one of them.")
    binds = _binds(bind)
    arguments = dict(_name_and_value(text) for text in build_arg or ())
    name = "cpu" if cpu else "vllm" if vllm else "gpu"
    started = time.monotonic()
    with _progress() as progress:
        build_image(output, name=name, base=base, arguments=arguments, binds=binds, progress=progress)
    say(f"built {output} in {time.monotonic() - started:.0f} s")
    raise typer.Exit(_check(output, python, binds, n_gpus=0))


@image_app.command()
def check(
    image: Annotated[Path, typer.Argument(metavar="IMAGE", help="A SIF, or an unpacked image.")],
    gpu: Annotated[bool, typer.Option("--gpu", help="Require this machine's GPUs to be usable in it.")] = False,
    bind: BindOption = None,
    python: PythonOption = "python3",
) -> None:
    """Start an image as a task would, and print one line for each check.

    Exits with 2 if a check fails.
    """
    raise typer.Exit(_check(image, python, _binds(bind), n_gpus=1 if gpu else 0))


def _check(image: Path, python: str, binds: list[Bind], *, n_gpus: int) -> int:
    from slurmgpu.cli.commands.check import describe_image, print_line, print_node
    from slurmgpu.containers.image_build import find_runtime, find_runtime_of
    from slurmgpu.containers.settings import Container
    from slurmgpu.task.preflight import check_image

    try:
        runtime, identity = find_runtime_of(image)
    except SlurmGPUError as error:
        print_line(False, "image", str(error))
        return 2
    print_line(True, "image", describe_image(image, identity))
    find_runtime()  # raises SlurmGPUError on a machine that has none
    container = Container(str(image.absolute()), runtime.name, python, tuple(binds), identity=identity)
    return print_node(check_image(container, n_gpus=n_gpus), "inside")


def _binds(texts: list[str] | None) -> list[Bind]:
    from slurmgpu.containers.settings import Bind

    # A bind's source is relative to the working directory, not to the folder in which the runtime builds.
    return [Bind.parse(text, Path.cwd()) for text in texts or ()]


def _name_and_value(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise SlurmGPUError(f"--build-arg {text} is not of the form NAME=VALUE.")
    return name, value


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, bool], None]]:
    """Shows a build's output: on a terminal the last line and the time, else each step on a line of its own."""
    from rich.text import Text

    from slurmgpu.cli.console import plain_console
    from slurmgpu.util.amounts import wide_clock

    console = plain_console(stderr=True)
    if not console.is_terminal:
        yield lambda line, is_step: console.out(line) if is_step else None
        return
    started = time.monotonic()
    with console.status("building") as status:

        def show(line: str, is_step: bool) -> None:
            text = Text(f"{wide_clock(time.monotonic() - started)}  {line}")
            text.truncate(console.width - 2, overflow="ellipsis")  # keeps it on one line, beside the spinner
            status.update(text)

        yield show
