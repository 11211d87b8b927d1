"""matplotlib pictures as small inline SVG in the page's colours."""

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
    "ink", "muted", "line", "cut", "surface", "starting", "loading", "running", "bad", "useful", "overhead", "idle",
    "lost", "repeated", "band", "chosen", "ended",
)  # fmt: skip
COLOURS = {name: f"#0a0b{number:02x}" for number, name in enumerate(NAMES, 0x10)}
"""Placeholder colours: each becomes the page's CSS variable of that name, in light and dark mode."""
FOREIGN = {f"{{{SVG}}}metadata", f"{{{SVG}}}style"}
INVISIBLE = {"fill: none", "opacity: 0"}
_SENTINELS = {colour: f"var(--{name})" for name, colour in COLOURS.items()}
WIDE, NARROW, SMALL = 1120, 340, 380
"""Widths of pictures in pixels: the whole page, a phone, and one of three in a row."""
RIGHT = 36
"""Pixels to the right of the axes: half of the longest label of the time axis."""
MARK = "t-"
"""The prefix of group ids that become classes: the lines of a task."""
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
    """Draw in the page's style, with ids that are unique to the picture."""
    with mpl.rc_context({**mpl.rcParamsDefault, **STYLE, "svg.hashsalt": name}):
        yield


def figure(width: float, height: float, *, left: float, right: float, top: float, bottom: float) -> Figure:
    """An empty figure; sizes and margins around the axes are in pixels."""
    made = Figure(figsize=(width / 72, height / 72), dpi=72)
    FigureCanvasSVG(made)
    made.subplots_adjust(
        left=left / width, right=1 - right / width, top=1 - top / height, bottom=bottom / height, hspace=0
    )
    return made


def picture(name: str, description: str, draw: Callable[[], Figure]) -> str:
    """The inline SVG of the figure that `draw` returns; `description` is for screen readers."""
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
    """Remove invisible elements, metadata, and styles that would apply to the whole page."""
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
    """The same path in fewer bytes: to a tenth of a pixel, with each point relative to the one before."""
    parts: list[str] = []
    here: tuple[int, int] | None = None  # in tenths of a pixel; None if unknown
    for found in re.finditer(r"([A-Za-z])([^A-Za-z]*)", path):
        command, numbers = found[1], [round(10 * float(number)) for number in found[2].split()]
        before, here = here, (numbers[-2], numbers[-1]) if numbers else None
        if command not in ("M", "L") or before is None or here is None:
            parts += [command, *map(_number, numbers)]
            continue
        dx, dy = here[0] - before[0], here[1] - before[1]
        if command == "M" or (dx and dy):
            parts.append(f"{command.lower()}{_number(dx)} {_number(dy)}")
        elif dx or dy:
            parts.append(f"h{_number(dx)}" if dx else f"v{_number(dy)}")
    return re.sub(r"(?<=[A-Za-z]) | (?=[A-Za-z-])", "", " ".join(parts))


def _number(tenths: int) -> str:
    """A number of tenths in SVG, without needless zeros."""
    whole, tenth = divmod(abs(tenths), 10)
    text = f"{whole or ''}.{tenth}" if tenth else f"{whole}"
    return f"-{text}" if tenths < 0 else text
