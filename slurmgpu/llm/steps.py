"""Trees of reasoning steps: the paths that were sampled for one question, equal beginnings being one node.

A node's value estimates how probable a right answer is from there on: the share of right answers among completions that
were sampled from it, as in Math-Shepherd (Wang et al. 2024, arXiv:2312.08935).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field

ROOT = 0


@dataclass
class Node:
    """One step behind the steps above it. `leaf` is the last step of a path; such a node has no children.

    `prefix` is the text down to here, which no other node has. `drawn` counts samples that passed through each child;
    `visits` and `hits` count completions, and right ones, that were sampled from here to learn the node's value.
    """

    parent: int
    depth: int
    text: str
    leaf: bool = False
    prefix: str = ""
    children: dict[tuple[str, bool], int] = field(default_factory=dict)
    drawn: Counter[int] = field(default_factory=Counter)
    visits: int = 0
    hits: int = 0


@dataclass(frozen=True)
class Path:
    """One sampled answer: the nodes of its steps, from the first step to the leaf, and the answer's whole text."""

    nodes: tuple[int, ...]
    text: str
    answer: str | None
    correct: bool
    cut: bool
    is_long: bool = False


class Tree:
    """The nodes and paths of one question; node 0 is the question itself, before any step.

    A path has at most `max_steps` nodes: the last is all the rest, and the path `is_long`.
    """

    def __init__(self, delimiter: str, max_steps: int) -> None:
        self.delimiter = delimiter
        self.max_steps = max_steps
        self.nodes = [Node(-1, 0, "")]
        self.paths: list[Path] = []

    def whole_text(self, node: int, completion: str) -> str:
        """An answer that begins with the steps down to `node`."""
        return self.nodes[node].prefix + completion

    def add(self, start: int, completion: str, *, answer: str | None, correct: bool, cut: bool) -> None:
        """Add the path that `completion` makes of the steps down to the node it was sampled from.

        The whole text is cut into steps, not the completion: one that begins with a blank step makes the step before
        it longer, and so belongs below another node, which may be there.
        """
        whole = self.whole_text(start, completion)
        steps = split_steps(whole, self.delimiter)
        is_long = len(steps) > self.max_steps
        if is_long:
            steps[self.max_steps - 1 :] = [self.delimiter.join(steps[self.max_steps - 1 :])]
        node, nodes = ROOT, []
        for depth, text in enumerate(steps):
            child = self._child(node, text, depth == len(steps) - 1)
            if depth >= self.nodes[start].depth:  # above, the sample says nothing of which steps are likely
                self.nodes[node].drawn[child] += 1
            node = child
            nodes.append(node)
        self.nodes[node].visits += 1
        self.nodes[node].hits += correct
        self.paths.append(Path(tuple(nodes), whole, answer, correct, cut, is_long))

    def open_nodes(self, depth: int | None = None) -> list[int]:
        """The nodes from where a path can go on, the question left out; at one depth only, if one is given."""
        return [
            number
            for number, node in enumerate(self.nodes)
            if number != ROOT and not node.leaf and depth in (None, node.depth)
        ]

    def n_drawn(self, node: int) -> int:
        """How many of the paths passed through a node, counting only those sampled at it or above it."""
        return sum(self.nodes[node].drawn.values())

    def values(self) -> list[tuple[float, int]]:
        """Each node's value, and on how many completions it rests.

        Where completions were sampled for that, it is the share of right ones. Elsewhere it is the mean of the
        children's values, each counted as often as it was drawn, so that a child which was explored further weighs no
        more; a node rests on all the paths below it then.
        """
        found = [(0.0, 0)] * len(self.nodes)
        for number in range(len(self.nodes) - 1, -1, -1):  # children come behind their parent
            node = self.nodes[number]
            if node.visits:
                found[number] = (node.hits / node.visits, node.visits)
            elif node.drawn:
                total = sum(found[child][0] * count for child, count in node.drawn.items())
                found[number] = (total / self.n_drawn(number), sum(found[child][1] for child in node.drawn))
        return found

    def _child(self, parent: int, text: str, leaf: bool) -> int:
        above = self.nodes[parent]
        number = above.children.get((text, leaf))
        if number is None:
            number = above.children[text, leaf] = len(self.nodes)
            prefix = "" if leaf else above.prefix + text + self.delimiter
            self.nodes.append(Node(parent, above.depth + 1, text, leaf, prefix))
        return number


def split_steps(text: str, delimiter: str) -> list[str]:
    """The steps of a text, of which `delimiter.join` makes it again; a blank piece belongs to the step before it."""
    steps: list[str] = []
    for piece in text.split(delimiter):
        if steps and (not piece.strip() or not steps[-1].strip()):
            steps[-1] += delimiter + piece
        else:
            steps.append(piece)
    return steps


def prefix_key(prefix: str) -> int:
    """A number of 63 bits for the beginning of an answer, the same everywhere: part of the key of its samples."""
    return int.from_bytes(hashlib.blake2b(prefix.encode(), digest_size=8).digest(), "little") >> 1
