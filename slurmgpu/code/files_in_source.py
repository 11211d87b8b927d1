"""Find the files that a Python file reads and writes, by its syntax tree.

Any text in a program may name a file or a module (Hydra's `_target_`). It counts as read unless it is an argument of a
call that writes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from slurmgpu.code.imports_in_source import called_name, levels_up

DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
"""A text that may name a module, a class or a function: Hydra's `_target_: models.nets.Net`."""
_LONGEST_NAME = 256
_CONFIG_FOLDER = frozenset({"config_path", "config_dir"})
"""Arguments of `hydra.main`, `hydra.initialize` and `hydra.initialize_config_dir`."""
_OF_HYDRA = frozenset({"hydra.main", "hydra.initialize", "initialize", "initialize_config_dir"})
_MAKE_PATHS = frozenset({"Path", "join", "joinpath", "str", "resolve", "absolute", "abspath", "expanduser"})
_FOR_WRITING = re.compile(r"[wax][bt+]*|r[bt]?\+[bt]?")
_MOVES = frozenset({"replace", "rename", "move", "copy", "copy2", "copyfile"})
_OPTIONS = frozenset({"add_argument", "option", "Option"})
"""Calls that declare an option, of argparse, click and Typer."""
_NO_OUTPUTS = frozenset({"write", "writelines", "mkdir", "makedirs", "FileHandler", "basicConfig"})
"""Calls whose argument is no file name, or names a log, to which several processes may append."""
OUTPUT_FOLDERS = frozenset(
    {"output_dir", "out_dir", "outdir", "save_dir", "log_dir", "logging_dir", "dirpath", "default_root_dir", "work_dir"}
)
"""Names that transformers, Lightning and others give to arguments and options for an output folder."""
OUTPUT_OPTIONS = OUTPUT_FOLDERS | {
    *("out", "output", "output_path", "save_path", "result_dir", "results_dir", "checkpoint_dir", "ckpt_dir"),
    *("exp_dir", "run_dir", "logdir", "workdir", "savedir"),
}
"""Names of options for what a script writes."""
_APPENDS = frozenset({"a", "ab", "at", "a+"})
_FILE = re.compile(r"(?!/dev/)[^\s*?]*[^\s*?/.]\.[A-Za-z]\w{0,9}")
_WRITES = (
    "write",
    "save",
    "dump",
    "to_csv",
    "to_json",
    "to_yaml",
    "mkdir",
    "makedirs",
    "touch",
    "FileHandler",
    "basicConfig",
)


class FilesInSource(ast.NodeVisitor):
    """The names of files that a Python file reads and writes, and whether it sets CUDA_VISIBLE_DEVICES."""

    def __init__(self, tree: ast.Module) -> None:
        self.config_folders: set[str] = set()
        """Folders of configurations that it passes to Hydra."""
        self.output_folders: set[str] = set()
        """The folders into which it writes, spelt out."""
        self._own = {each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
        """Its own functions, which may put a file that they are given into a folder: `save_checkpoint("last.pt")`."""
        self.outputs: set[str] = set()
        """The files that it writes under a fixed name."""
        self.output_options: dict[str, str] = {}
        """Its default output folders, by the name of the option that changes them."""
        self.gpus_line = 0
        """The line that sets CUDA_VISIBLE_DEVICES to other than "" and "-1"; 0 without any."""
        self._texts: set[str] = set()
        """Texts, and paths joined from texts."""
        self._written: set[str] = set()
        """Texts in calls that write files."""
        self._written_names: set[str] = set()
        """Names of variables and attributes in such calls."""
        self._assigned: list[tuple[set[str], set[str]]] = []
        """The names of variables, arguments and options, with the texts in their values."""
        self.visit(tree)

    def read_texts(self) -> set[str]:
        """The texts that may name modules or files that it reads, without the names of files that it writes."""
        written = self._written.union(*(texts for names, texts in self._assigned if names & self._written_names))
        # A joined path is one text in _texts, but its parts are separate in `written`.
        return {text for text in self._texts if text not in written and not written.issuperset(text.split("/"))}

    def visit_Constant(self, node: ast.Constant) -> None:
        """A text that may be a name or a path."""
        if isinstance(node.value, str) and len(node.value) <= _LONGEST_NAME and node.value.isprintable():
            self._texts.add(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """The parts of an f-string are no names."""
        for each in node.values:
            if isinstance(each, ast.FormattedValue):
                self.visit(each.value)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """`Path(__file__).parent / "configs" / "small.yaml"`."""
        parts: list[ast.expr] = []
        left: ast.expr = node
        while isinstance(left, ast.BinOp) and isinstance(left.op, ast.Div):
            parts.insert(0, left.right)
            left = left.left
        self._add_path([left, *parts] if parts else ())
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """A path that is joined, an option with its default, a file that is written, a folder of configurations."""
        name = called_name(node)
        if name in ("join", "joinpath"):
            self._add_path(node.args)
        elif name in _OPTIONS:
            self._add_option(node)
        self._add_outputs(name, node)
        self._add_config_folders(name, node)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        """`CACHE = "cache.json"`, which a later call may write; `os.environ["CUDA_VISIBLE_DEVICES"] = "0"`."""
        match node:
            case ast.Assign(value=ast.Constant(value="" | "-1")):
                pass
            case ast.Assign(targets=[ast.Subscript(slice=ast.Constant(value="CUDA_VISIBLE_DEVICES"))]):
                self.gpus_line = node.lineno
        self._assigned += [(_path_in(target)[1], _path_in(node.value)[0]) for target in node.targets]
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """`cache: str = "cache.json"`, also as a field of a class."""
        if node.value is not None:
            self._assigned.append((_path_in(node.target)[1], _path_in(node.value)[0]))
        self.generic_visit(node)

    def visit_arguments(self, node: ast.arguments) -> None:
        """`def keep(state, path="cache.json")`."""
        names = [each.arg for each in (*node.posonlyargs, *node.args)]
        pairs = [*zip(reversed(names), reversed(node.defaults), strict=False)]
        pairs += [(each.arg, value) for each, value in zip(node.kwonlyargs, node.kw_defaults, strict=True) if value]
        self._assigned += [({name}, _path_in(value)[0]) for name, value in pairs]
        self.generic_visit(node)

    def _add_path(self, parts: Sequence[ast.expr]) -> None:
        """Add the constant parts at the end of a path, joined."""
        found: list[str] = []
        for part in reversed(parts):
            if not (isinstance(part, ast.Constant) and isinstance(part.value, str)):
                break
            found.insert(0, part.value)
        if len(found) > 1:
            self._texts.add("/".join(found))

    def _add_option(self, call: ast.Call) -> None:
        """`add_argument("--output-dir", default="out")`."""
        default = next((each.value for each in call.keywords if each.arg == "default"), None)
        if default is None or not call.args or not isinstance(call.args[0], ast.Constant):
            return
        option = str(call.args[0].value).lstrip("-").replace("-", "_")
        self._assigned.append(({option}, _path_in(default)[0]))
        if option in OUTPUT_OPTIONS and (path := _spelt_out(default)):
            self.output_options[option] = path

    def _add_outputs(self, name: str, call: ast.Call) -> None:
        """`open("log.txt", "w")`, `frame.to_csv(path)`, `TrainingArguments(output_dir="out")`."""
        written = _written_by(name, call)
        for path in written:
            texts, variables = _path_in(path)
            self._written |= texts
            self._written_names |= variables
        whole = {path for path in map(_spelt_out, written) if path is not None}
        if name not in _NO_OUTPUTS | self._own and not _APPENDS & whole:
            self.outputs |= {path for path in whole if _FILE.fullmatch(path)}
        folders = [each.value for each in call.keywords if each.arg in OUTPUT_FOLDERS]
        folders += call.args[:1] if name == "TrainingArguments" else []
        self.output_folders |= {folder for folder in map(_spelt_out, folders) if folder}

    def _add_config_folders(self, name: str, call: ast.Call) -> None:
        """`@hydra.main(config_path="conf")`, `initialize("conf")`."""
        named = [each.value for each in call.keywords if each.arg in _CONFIG_FOLDER]
        if name in ("main", "initialize", "initialize_config_dir") and ast.unparse(call.func) in _OF_HYDRA:
            named += call.args[:1]
        self.config_folders |= {
            each.value for each in named if isinstance(each, ast.Constant) and isinstance(each.value, str)
        }


def folders_above(tree: ast.Module) -> int:
    """How many folders up from its own file a module looks for others: 3 in `ROOT = Path(__file__).parents[2]`."""
    of_file = others = 0
    for statement in ast.walk(tree):
        if isinstance(statement, ast.stmt):
            for each in ast.iter_child_nodes(statement):
                if isinstance(each, ast.expr | ast.withitem):
                    n_up, is_of_file = levels_up(each)
                    of_file, others = (max(of_file, n_up), others) if is_of_file else (of_file, max(others, n_up))
    return of_file + others if of_file else 0  # others: `ROOT = HERE.parent`


def texts_in(tree: ast.Module) -> list[str]:
    """All texts but docstrings and the like, which stand alone."""
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in alone)
    return [node.value for node in found if isinstance(node.value, str)]


def _path_in(node: ast.expr) -> tuple[set[str], set[str]]:
    """The texts, and the names of variables and attributes, that an expression joins into a path."""
    match node:
        case ast.Constant(value=str(text)):
            return {text}, set()
        case ast.Attribute(value=ast.Name(id="os"), attr="path"):  # in `os.path.join`
            return set(), set()
        case ast.Name(id=name) | ast.Attribute(attr=name) if name != "parent":
            return set(), {name}
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            parts = [left, right]
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name), args=arguments) if name in _MAKE_PATHS:
            parts = [*([node.func.value] if isinstance(node.func, ast.Attribute) else []), *arguments]
        case _:
            return set(), set()
    found = list(map(_path_in, parts))
    return set().union(*(texts for texts, _ in found)), set().union(*(names for _, names in found))


def _spelt_out(node: ast.expr) -> str | None:
    """The path that an expression makes of constants alone; None for other expressions."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            parts = [left, right]
        case ast.Call(func=ast.Name(id="Path") | ast.Attribute(attr="Path"), args=[_, *_] as parts):
            pass
        case _:
            return None
    texts = [text for text in map(_spelt_out, parts) if text is not None]
    return "/".join(texts) if len(texts) == len(parts) else None


def _written_by(name: str, call: ast.Call) -> list[ast.expr]:
    """The parts of a call that may name the file it writes: its arguments, and a method's object. None if it reads."""
    receiver = [call.func.value] if isinstance(call.func, ast.Attribute) else []
    if name in _MOVES:
        if ast.unparse(call.func).startswith(("os.", "shutil.")):
            return call.args[1:2]
        # `Path.replace` and `Path.rename`; `str.replace` has two arguments.
        return call.args if receiver and len(call.args) == 1 and name in ("replace", "rename") else []
    everything = [*receiver, *call.args, *(each.value for each in call.keywords)]
    if name != "open":
        return everything if name.startswith(_WRITES) else []
    modes = [*call.args[1:2], *(each.value for each in call.keywords if each.arg == "mode")]
    modes += call.args[:1] if receiver else []  # the mode of `Path.open`; the file of `gzip.open`
    texts = [each.value for each in modes if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    return everything if any(map(_FOR_WRITING.fullmatch, texts)) else []
