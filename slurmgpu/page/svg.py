"""Pictures of matplotlib as SVG that lies in a page: in the page's colours, and small."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from xml.etree import ElementTree

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

SVG = "http://www.w3.org/2000/svg"
LINK = "{http://www.w3.org/1999/xlink}href"
NAMES = (
    "ink", "muted", "line", "cut", "surface", "starting", "loading", "running", "bad", "useful", "idle", "lost",
    "repeated", "band", "chosen", "ended",
)  # fmt: skip
COLOURS = {name: f"#0a0b{number:02x}" for number, name in enumerate(NAMES, 0x10)}
"""What is drawn with one of these colours gets the page's colour of that name, in the light as in the dark."""
FOREIGN = {f"{{{SVG}}}metadata", f"{{{SVG}}}style"}
INVISIBLE = {"fill: none", "opacity: 0"}
_SENTINELS = {colour: f"var(--{name})" for name, colour in COLOURS.items()}
WIDE, NARROW, SMALL = 1120, 340, 380
"""How many pixels wide a picture is drawn: over the whole page, on a phone, and as one of three in a row."""
RIGHT = 36
"""Pixels to the right of every picture's axes: the longest name of a time on their edge is twice as wide."""
MARK = "t-"
"""Groups whose ids begin with this are kept, as classes: lines of a task."""
STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 11.0,
    "text.parse_math": False,  # a dollar in a node's name is a dollar
    "text.color": COLOURS["ink"],
    "axes.edgecolor": COLOURS["line"],
    "axes.labelcolor": COLOURS["muted"],
    "axes.titlesize": 11.0,
    "axes.labelsize": 11.0,
    "axes.facecolor": "none",
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.linewidth": 1.0,
    "grid.color": COLOURS["line"],
    "grid.linewidth": 0.8,
    "figure.facecolor": "none",
    "xtick.color": COLOURS["line"],
    "ytick.color": COLOURS["line"],
    "xtick.labelcolor": COLOURS["muted"],
    "ytick.labelcolor": COLOURS["muted"],
    "ytick.major.size": 0.0,
    "lines.solid_capstyle": "butt",
    "path.simplify_threshold": 0.3,
}


@contextmanager
def style(name: str) -> Iterator[None]:
    """What is drawn within has the pages' look; ids made within are those of this picture alone."""
    with mpl.rc_context({**mpl.rcParamsDefault, **STYLE, "svg.hashsalt": name}):
        yield


def figure(width: float, height: float, *, left: float, right: float, top: float, bottom: float) -> Figure:
    """An empty figure of so many pixels, with these margins in pixels around its axes."""
    made = Figure(figsize=(width / 72, height / 72), dpi=72)
    FigureCanvasSVG(made)
    made.subplots_adjust(
        left=left / width, right=1 - right / width, top=1 - top / height, bottom=bottom / height, hspace=0
    )
    return made


def picture(name: str, description: str, draw: Callable[[], Figure]) -> str:
    """The SVG of the figure that `draw` returns, to lie in a page; `description` is for those who cannot see it."""
    with style(name):
        buffer = io.BytesIO()
        draw().savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return _inline(name, description, buffer.getvalue())


def _inline(name: str, description: str, written: bytes) -> str:
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", LINK[1:].partition("}")[0])
    root = ElementTree.fromstring(written)
    _prune(root)
    used = {
        target
        for node in root.iter()
        for value in node.attrib.values()
        for target in re.findall(r"#([\w.-]+)(?=\)|$)", value)
        if not re.fullmatch(r"[0-9a-f]{6}", target)
    }
    for node in root.iter():
        _tidy(node, name, used)
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    title = ElementTree.Element(f"{{{SVG}}}title", id=f"{name}-title")
    title.text = description
    root.insert(0, title)
    root.attrib |= {"role": "img", "aria-labelledby": f"{name}-title"}
    return ElementTree.tostring(root, encoding="unicode")


def _prune(root: ElementTree.Element) -> None:
    """Leave out what holds nothing, metadata, and styles that would be those of the whole page."""
    for parent in root.iter():
        for child in list(parent):
            if child.tag in FOREIGN or (child.tag == f"{{{SVG}}}path" and child.get("style") in INVISIBLE):
                parent.remove(child)


def _tidy(node: ElementTree.Element, name: str, used: set[str]) -> None:
    if node.text and not node.text.strip():
        node.text = None
    if node.tail and not node.tail.strip():
        node.tail = None
    identity = node.attrib.pop("id", None)
    if identity in used:
        node.set("id", f"{name}-{identity}")
    elif identity and identity.startswith(MARK):
        node.set("class", f"task {identity}")
    for key, value in node.attrib.items():
        if key == "d":
            node.set(key, compact(value))
        elif key == "style":
            node.set(key, _styled(value, name))
        elif key == LINK or value.startswith("url(#"):
            node.set(key, value.replace("#", f"#{name}-"))


def _styled(text: str, name: str) -> str:
    parts = []
    for part in text.split(";"):
        key, _, value = (word.strip() for word in part.partition(":"))
        if not key or key == "stroke-linejoin" or key == "font-family":
            continue
        if key == "font":
            size = re.search(r"([\d.]+)px", value)
            key, value = "font-size", f"{size[1]}px" if size else "11px"
        value = value.replace("url(#", f"url(#{name}-")
        parts.append(f"{key}:{_SENTINELS.get(value, value)}")
    return ";".join(parts)


def compact(path: str) -> str:
    """The same path in fewer bytes: a tenth of a pixel is enough, and the way from the last point is shorter."""
    parts: list[str] = []
    here: tuple[int, int] | None = None  # in tenths; None where it is not known
    for command, numbers in _steps(path):
        if command not in ("M", "L"):
            parts += [command, *map(_number, numbers)]
            here = (numbers[-2], numbers[-1]) if numbers else None
            continue
        x, y = numbers
        if command == "L" and here == (x, y):
            continue
        parts.append(min(_ways(command, here, x, y), key=len))
        here = x, y
    return re.sub(r"(?<=[A-Za-z]) | (?=[A-Za-z-])", "", " ".join(parts))


def _steps(path: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The commands of a path of matplotlib's, with their numbers in tenths."""
    for found in re.finditer(r"([A-Za-z])([^A-Za-z]*)", path):
        yield found[1], tuple(round(10 * float(number)) for number in found[2].split())


def _ways(command: str, here: tuple[int, int] | None, x: int, y: int) -> Iterator[str]:
    """The ways to say that one goes to a point: a move, or a line."""
    if here is None:
        yield f"{command}{_number(x)} {_number(y)}"
        return
    dx, dy = x - here[0], y - here[1]
    if command == "L" and dy == 0:
        yield from (f"H{_number(x)}", f"h{_number(dx)}")
    elif command == "L" and dx == 0:
        yield from (f"V{_number(y)}", f"v{_number(dy)}")
    else:
        yield f"{command}{_number(x)} {_number(y)}"
        yield f"{command.lower()}{_number(dx)} {_number(dy)}"


def _number(tenths: int) -> str:
    """A number of tenths as SVG has it, without zeros that say nothing."""
    whole, tenth = divmod(abs(tenths), 10)
    text = f"{whole or ''}.{tenth}" if tenth else f"{whole}"
    return f"-{text}" if tenths < 0 else text
