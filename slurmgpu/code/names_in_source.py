"""Names in a Python file: the modules that it imports, and texts that may name modules and files."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass

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
_NO_OUTPUTS = frozenset({"write", "writelines", "mkdir", "FileHandler", "basicConfig"})
"""Calls that get no name of a file, or that of a log, to which all may write."""
_OUTPUT_FOLDERS = frozenset(
    {"output_dir", "out_dir", "outdir", "save_dir", "log_dir", "logging_dir", "dirpath", "default_root_dir", "work_dir"}
)
"""Arguments and options for a folder into which a script writes; of transformers, Lightning and their like."""
_APPENDS = frozenset({"a", "ab", "at", "a+"})
_FILE = re.compile(r"(?!/dev/)[^\s*?]*[^\s*?/.]\.[A-Za-z]\w{0,9}")
_WRITES = ("write", "save", "dump", "to_csv", "to_json", "to_yaml", "mkdir", "touch", "FileHandler", "basicConfig")


@dataclass(frozen=True)
class PathFolder:
    """A folder, relative to the one that is `n_up` above the file, 1 that of the file; None is the working folder."""

    n_up: int | None
    name: str
    is_first: bool
    """Whether it is put before the others."""


class NamesInSource(ast.NodeVisitor):
    """The modules that a file imports, whether each is imported unconditionally, and texts that may name others."""

    def __init__(self, package: str | None) -> None:
        self.names: list[tuple[str, bool]] = []
        self.modules: set[str] = set()
        """The names that must be modules."""
        self.below: set[str] = set()
        """Packages from which it imports modules by names computed at run time."""
        self.made_up = 0
        """The line of an import by an unknown name."""
        self.walks = False
        """Whether it goes through the modules of a package that is in `below`."""
        self.texts: set[str] = set()
        """Texts, and paths that are joined of texts, which may name a module, a class or a file that it reads."""
        self.config_folders: set[str] = set()
        """Folders of configurations, as Hydra is given."""
        self._package = package
        self._aliases: dict[str, str] = {}
        self.path_folders: list[PathFolder] = []
        """Folders that it puts on `sys.path`."""
        self.stars: set[str] = set()
        """Packages of which it imports all names, and so the modules in their `__all__`."""
        self.written: set[str] = set()
        """Texts in calls that write files, which are names of what it makes."""
        self.chooses_gpus = 0
        """The line that sets CUDA_VISIBLE_DEVICES to show GPUs."""
        self.outputs: set[str] = set()
        """The files and folders that it writes by a name which it spells out."""
        self.output_options: dict[str, str] = {}
        """The folders into which it writes unless an option, by its name, says another."""
        self._assigned: list[tuple[set[str], set[str]]] = []
        """The names of variables, arguments and options, and the texts that they are given."""
        self._written_names: set[str] = set()
        self._depth = 0

    def visit_Try(self, node: ast.Try) -> None:
        """Imports within `try` may fail."""
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1

    def visit_If(self, node: ast.If) -> None:
        """Skip imports for type checkers."""
        test = node.test
        name = test.attr if isinstance(test, ast.Attribute) else test.id if isinstance(test, ast.Name) else ""
        self._depth += 1
        for each in node.orelse if name == "TYPE_CHECKING" else ast.iter_child_nodes(node):
            self.visit(each)
        self._depth -= 1

    def visit_Import(self, node: ast.Import) -> None:
        """`import a.b`."""
        for alias in node.names:
            self._add(alias.name)
            self.modules.add(alias.name)
            self._aliases[alias.asname or alias.name.partition(".")[0]] = (
                alias.name if alias.asname else alias.name.partition(".")[0]
            )

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """`from a import b`, where b may be a module."""
        base = node.module or ""
        if node.level:
            if not self._package:
                return
            above = self._package.split(".")
            if node.level > len(above):
                return
            base = ".".join([*above[: len(above) - node.level + 1], *([base] if base else [])])
        self._add(base)
        self.modules.add(base)
        for alias in node.names:
            if alias.name == "*":
                self.stars.add(base)
            else:
                self._add(f"{base}.{alias.name}")
                self._aliases[alias.asname or alias.name] = f"{base}.{alias.name}"

    def visit_Call(self, node: ast.Call) -> None:
        """`importlib.import_module("a.b")`, `importlib.import_module(f"plugins.{name}")`."""
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if name in ("import_module", "__import__", "run_module") and node.args:
            begin, is_whole = _beginning(node.args[0])
            package, dot, _ = begin.rpartition(".")
            if is_whole and not begin.startswith("."):
                self.names.append((begin, False))
            elif dot and not begin.startswith("."):
                self.below.add(package)
            else:
                self.made_up = node.lineno
        elif name in ("iter_modules", "walk_packages") and node.args:
            if (walked := self._walked(node.args[0])) is not None:
                self.below.add(walked)
                self.walks = True
        elif name in ("append", "insert") and node.args and ast.unparse(function).startswith("sys.path."):
            self.path_folders.append(_folder_in(node.args[-1], is_first=name == "insert"))
        elif name in ("join", "joinpath"):
            self._add_path(node.args)
        elif name in _OPTIONS and node.args and isinstance(node.args[0], ast.Constant):
            for each in node.keywords:
                if each.arg == "default":
                    option = str(node.args[0].value).lstrip("-").replace("-", "_")
                    self._assigned.append(({option}, _path_in(each.value)[0]))
                    if option in _OUTPUT_FOLDERS and (folder := _spelt_out(each.value)):
                        self.output_options[option] = folder
        written = _written_by(name, node)
        for path in written:
            texts, variables = _path_in(path)
            self.written |= texts
            self._written_names |= variables
        if name not in _NO_OUTPUTS and not _APPENDS.intersection(whole := set(map(_spelt_out, written))):
            self.outputs |= {each for each in whole if each is not None and _FILE.fullmatch(each)}
        folders = [each.value for each in node.keywords if each.arg in _OUTPUT_FOLDERS]
        folders += node.args[:1] if name == "TrainingArguments" else []
        self.outputs |= {each for each in map(_spelt_out, folders) if each}
        is_of_hydra = name in ("main", "initialize", "initialize_config_dir") and ast.unparse(function) in _OF_HYDRA
        if is_of_hydra and node.args and isinstance(node.args[0], ast.Constant):
            self.config_folders |= _path_in(node.args[0])[0]
        self.config_folders |= {
            each.value.value
            for each in node.keywords
            if each.arg in _CONFIG_FOLDER and isinstance(each.value, ast.Constant) and isinstance(each.value.value, str)
        }
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        """`CACHE = "cache.json"`, which a later call may write; `os.environ["CUDA_VISIBLE_DEVICES"] = "0"`."""
        match node:
            case ast.Assign(value=ast.Constant(value="" | "-1")):
                pass
            case ast.Assign(targets=[ast.Subscript(slice=ast.Constant(value="CUDA_VISIBLE_DEVICES"))]):
                self.chooses_gpus = node.lineno
        texts, _ = _path_in(node.value)
        self._assigned += [(_path_in(target)[1], texts) for target in node.targets]
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

    def read_texts(self) -> set[str]:
        """The texts that may name modules and files that it reads, without those of what it writes."""
        written = self.written.union(*(texts for names, texts in self._assigned if names & self._written_names))
        # A path that is joined is among the texts as one, and among what is written in its parts.
        return {text for text in self.texts if text not in written and not written.issuperset(text.split("/"))}

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """`Path(__file__).parent / "configs" / "small.yaml"`."""
        parts: list[ast.expr] = []
        left: ast.expr = node
        while isinstance(left, ast.BinOp) and isinstance(left.op, ast.Div):
            parts.insert(0, left.right)
            left = left.left
        self._add_path([left, *parts] if parts else ())
        self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """The parts of an f-string are no names."""
        for each in node.values:
            if isinstance(each, ast.FormattedValue):
                self.visit(each.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        """A text that may be a name or a path."""
        if isinstance(node.value, str) and len(node.value) <= _LONGEST_NAME and node.value.isprintable():
            self.texts.add(node.value)

    def _add_path(self, parts: Sequence[ast.expr]) -> None:
        """Add the texts at the end of the parts of a path, joined."""
        found: list[str] = []
        for part in reversed(parts):
            if not (isinstance(part, ast.Constant) and isinstance(part.value, str)):
                break
            found.insert(0, part.value)
        if len(found) > 1:
            self.texts.add("/".join(found))

    def _walked(self, path: ast.expr) -> str | None:
        """The package whose `__path__` it is, or that the folder of this file is; None if it is another."""
        if isinstance(path, ast.Attribute) and path.attr == "__path__":
            first, *rest = ast.unparse(path.value).split(".")
            return ".".join((self._aliases[first], *rest)) if first in self._aliases else None
        is_here = any(isinstance(each, ast.Name) and each.id in ("__path__", "__file__") for each in ast.walk(path))
        return (self._package or None) if is_here else None

    def _add(self, name: str) -> None:
        self.names.append((name, self._depth == 0))


def _beginning(node: ast.expr) -> tuple[str, bool]:
    """The known beginning of a text expression, and whether that is the whole text."""
    match node:
        case ast.Constant(value=str(text)):
            return text, True
        case (
            ast.JoinedStr(values=[ast.Constant(value=str(text)), *_])
            | ast.BinOp(left=ast.Constant(value=str(text)), op=ast.Add())
        ):
            return text, False
        case ast.BinOp(left=ast.Constant(value=str(text)), op=ast.Mod()):
            return text.partition("%")[0], False
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str(text)), attr="format")):
            return text.partition("{")[0], False
    return "", False


def names_in(tree: ast.Module, package: str | None) -> NamesInSource:
    """The names in a syntax tree of a module of `package`."""
    found = NamesInSource(package)
    found.visit(tree)
    return found


def all_in(tree: ast.Module) -> list[str]:
    """The texts that a module has in `__all__`."""
    found = []
    for node in tree.body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id="__all__"), *_])
                | ast.AnnAssign(target=ast.Name(id="__all__"))
                | ast.AugAssign(target=ast.Name(id="__all__"))
            ):
                found += [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
    return [name for name in found if isinstance(name, str)]


def _folder_in(path: ast.expr, *, is_first: bool) -> PathFolder:
    """The folder of `Path(__file__).parents[1] / "src"`, `join(dirname(__file__), "src")` or `"src"`."""
    n_up, of_file, names = 0, False, []
    for node in ast.walk(path):
        match node:
            case ast.Name(id="__file__"):
                of_file = True
            case ast.Attribute(attr="parent") | ast.Call(func=ast.Attribute(attr="dirname") | ast.Name(id="dirname")):
                n_up += 1
            case ast.Subscript(value=ast.Attribute(attr="parents"), slice=ast.Constant(value=int(number))):
                n_up += 1 + number
            case ast.Constant(value=str(name)):
                names.append((node.lineno, node.col_offset, name))
    return PathFolder(n_up if of_file else None, "/".join(name for _, _, name in sorted(names)), is_first)


def defined_in(tree: ast.Module) -> frozenset[str]:
    """The names that a module has, as far as its source says; with `*` any name may be one."""
    found: set[str] = set()
    todo: list[ast.stmt] = [*tree.body]
    while todo:
        node = todo.pop()
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found.add("*" if node.name == "__getattr__" else node.name)
            case ast.Import() | ast.ImportFrom():
                found.update(alias.asname or alias.name for alias in node.names)
            case ast.Assign() | ast.AnnAssign():
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found.update(each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name))
            case ast.If() | ast.Try() | ast.With():
                todo += [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.stmt)]
                if isinstance(node, ast.Try):
                    todo += [each for handler in node.handlers for each in handler.body]
    return frozenset(found)


def _path_in(node: ast.expr) -> tuple[set[str], set[str]]:
    """The texts, and the names of variables and attributes, of which an expression makes a path."""
    match node:
        case ast.Constant(value=str(text)):
            return {text}, set()
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
    """The path that an expression is, whatever the arguments of the program."""
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
    """The arguments, and the object, of a call by which it may name a file that it writes; none of one that reads."""
    receiver = [call.func.value] if isinstance(call.func, ast.Attribute) else []
    if name in _MOVES:
        if ast.unparse(call.func).startswith(("os.", "shutil.")):
            return call.args[1:2]
        # `Path.replace` and `Path.rename`; that of a text has two arguments.
        return call.args if receiver and len(call.args) == 1 and name in ("replace", "rename") else []
    everything = [*receiver, *call.args, *(each.value for each in call.keywords)]
    if name != "open":
        return everything if name.startswith(_WRITES) else []
    modes = [*call.args[1:2], *(each.value for each in call.keywords if each.arg == "mode")]
    modes += call.args[:1] if receiver else []  # that of `Path.open`; of `gzip.open` it is a file
    texts = [each.value for each in modes if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    return everything if any(map(_FOR_WRITING.fullmatch, texts)) else []
