"""The modules that a Python file imports, and the names that it defines, from its syntax tree."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import NamedTuple


class Import(NamedTuple):
    """A name that a file imports."""

    name: str
    always: bool
    """Whether it is imported whenever the file is: not within `if` or `try`."""
    is_module: bool
    """Whether it must be a module; `from a import b` may also import a function b."""


@dataclass(frozen=True)
class PathFolder:
    """A folder that a file puts on `sys.path`: `name`, relative to the folder `n_up` levels above the file.

    1 is the file's own folder; None stands for the working folder.
    """

    n_up: int | None
    name: str
    is_first: bool
    """Whether it is put before the others."""


class ImportsInSource(ast.NodeVisitor):
    """The imports of a file of `package`, which may be "", also those within functions."""

    def __init__(self, tree: ast.Module, package: str) -> None:
        self.imports: list[Import] = []
        self.stars: set[str] = set()
        """Packages from which it imports `*`, and with it the modules in their `__all__`."""
        self.plugin_packages: set[str] = set()
        """Packages from which it imports modules by names computed at run time."""
        self.unknown_line = 0
        """The last line that imports by a computed name whose package is unknown, too; 0 without any."""
        self.walks = False
        """Whether it lists the modules of a package, which is then in `plugin_packages`."""
        self.path_folders: list[PathFolder] = []
        """Folders that it puts on `sys.path`."""
        self._package = package
        self._aliases: dict[str, str] = {}
        self._n_conditions = 0
        self.visit(tree)

    def visit_Try(self, node: ast.Try) -> None:
        """Imports within `try` may fail."""
        self._n_conditions += 1
        self.generic_visit(node)
        self._n_conditions -= 1

    def visit_If(self, node: ast.If) -> None:
        """Skip imports for type checkers."""
        test = node.test
        name = test.attr if isinstance(test, ast.Attribute) else test.id if isinstance(test, ast.Name) else ""
        self._n_conditions += 1
        for each in node.orelse if name == "TYPE_CHECKING" else ast.iter_child_nodes(node):
            self.visit(each)
        self._n_conditions -= 1

    def visit_Import(self, node: ast.Import) -> None:
        """`import a.b`."""
        for alias in node.names:
            self._add(alias.name, is_module=True)
            top = alias.name.partition(".")[0]
            self._aliases[alias.asname or top] = alias.name if alias.asname else top

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
        self._add(base, is_module=True)
        for alias in node.names:
            if alias.name == "*":
                self.stars.add(base)
            else:
                self._add(f"{base}.{alias.name}", is_module=False)
                self._aliases[alias.asname or alias.name] = f"{base}.{alias.name}"

    def visit_Call(self, node: ast.Call) -> None:
        """`importlib.import_module(f"plugins.{name}")`, `pkgutil.iter_modules(plugins.__path__)`, `sys.path.append`."""
        name = called_name(node)
        if name in ("import_module", "__import__", "run_module") and node.args:
            self._add_computed(node.args[0])
        elif name in ("iter_modules", "walk_packages") and node.args:
            if (walked := self._walked(node.args[0])) is not None:
                self.plugin_packages.add(walked)
                self.walks = True
        elif name in ("append", "insert") and node.args and ast.unparse(node.func).startswith("sys.path."):
            self.path_folders.append(_folder_in(node.args[-1], is_first=name == "insert"))
        self.generic_visit(node)

    def _add(self, name: str, *, is_module: bool) -> None:
        self.imports.append(Import(name, self._n_conditions == 0, is_module))

    def _add_computed(self, name: ast.expr) -> None:
        """Add what `import_module` imports by a name that may be computed."""
        begin, is_whole = _beginning(name)
        package, dot, _ = begin.rpartition(".")
        if is_whole and not begin.startswith("."):
            self.imports.append(Import(begin, always=False, is_module=False))
        elif dot and not begin.startswith("."):
            self.plugin_packages.add(package)
        else:
            self.unknown_line = name.lineno

    def _walked(self, path: ast.expr) -> str | None:
        """The package whose modules are listed: by its `__path__`, or this file's own; None if it is unknown."""
        if isinstance(path, ast.Attribute) and path.attr == "__path__":
            first, *rest = ast.unparse(path.value).split(".")
            return ".".join((self._aliases[first], *rest)) if first in self._aliases else None
        is_here = any(isinstance(each, ast.Name) and each.id in ("__path__", "__file__") for each in ast.walk(path))
        return (self._package or None) if is_here else None


def called_name(call: ast.Call) -> str:
    """The name of the function or method that a call calls; "" for another expression."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


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


def _folder_in(path: ast.expr, *, is_first: bool) -> PathFolder:
    """The folder of `Path(__file__).parents[1] / "src"`, `join(dirname(__file__), "src")` or `"src"`."""
    n_up, of_file = levels_up(path)
    texts = (node for node in ast.walk(path) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    names = [str(node.value) for node in sorted(texts, key=lambda node: (node.lineno, node.col_offset))]
    return PathFolder(n_up if of_file else None, "/".join(names), is_first)


def levels_up(path: ast.AST) -> tuple[int, bool]:
    """How many folders an expression goes up, and whether it begins at `__file__`: 2 in `dirname(dirname(HERE))`."""
    n_up, of_file = 0, False
    for node in ast.walk(path):
        match node:
            case ast.Name(id="__file__"):
                of_file = True
            case ast.Attribute(attr="parent") | ast.Call(func=ast.Attribute(attr="dirname") | ast.Name(id="dirname")):
                n_up += 1
            case ast.Subscript(value=ast.Attribute(attr="parents"), slice=ast.Constant(value=int(number))):
                n_up += 1 + number
    return n_up, of_file


def all_in(tree: ast.Module) -> list[str]:
    """The names in a module's `__all__`."""
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


def defined_in(tree: ast.Module) -> frozenset[str]:
    """The names that a module defines at its top level; `*` among them: any other name may exist as well."""
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
