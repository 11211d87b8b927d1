"""Trees of reasoning steps: the sampled paths of one question share nodes for equal prefixes.

A node's value estimates the probability of a right answer from there: the share of right answers among completions
sampled from it, as in Math-Shepherd (Wang et al. 2024, arXiv:2312.08935).

Paths of a tree do not have the probabilities of independent samples: a node that few samples reached gets as many
branches as one that many reached. Counting how often a child was drawn from its parent corrects this: samples below a
node do not change how many pass through it, so estimates weighted by these counts are unbiased at each node, from the
leaves to the root.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from slurmgpu.llm.interface.engine import NOTHING_GENERATED, Generated

ROOT = 0


@dataclass
class Node:
    """A step after the steps above it. A `leaf` is the last step of a path, without children.

    `prefix` is the text down to here, unique except for hidden tokens such as those of the `reasoning`; `generated` are
    the tokens of the first path to this node. `drawn` counts samples that passed through each child; `visits` and
    `hits` count completions and right completions that were sampled from here for the node's value.
    """

    parent: int
    depth: int
    text: str
    leaf: bool = False
    prefix: str = ""
    generated: Generated = NOTHING_GENERATED
    reasoning: str = ""
    children: dict[tuple[tuple[int, ...], str, str, bool], int] = field(default_factory=dict)
    drawn: Counter[int] = field(default_factory=Counter)
    visits: int = 0
    hits: int = 0


@dataclass(frozen=True)
class Path:
    """A sampled answer: the nodes of its steps down to the leaf, its whole text, and why it is wrong, if known."""

    nodes: tuple[int, ...]
    text: str
    answer: str | None
    correct: bool
    cut: bool
    is_long: bool = False
    reasoning: str = ""
    failure: str | None = None


class Tree:
    """The nodes and paths of one question; node 0 is the question itself.

    A path has at most `max_steps` nodes; in a longer path, which `is_long`, the last node has all the rest.
    """

    def __init__(self, delimiter: str, max_steps: int) -> None:
        self.delimiter = delimiter
        self.max_steps = max_steps
        self.nodes = [Node(-1, 0, "")]
        self.paths: list[Path] = []

    def whole_text(self, node: int, completion: str) -> str:
        """The whole answer of a completion from `node`."""
        return self.nodes[node].prefix + completion

    def add(
        self,
        start: int,
        completion: str,
        *,
        answer: str | None,
        correct: bool,
        cut: bool,
        reasoning: str = "",
        failure: str | None = None,
        generated: Generated = NOTHING_GENERATED,
    ) -> None:
        """Add the path of a completion from the node `start`; `generated` has all tokens after the question.

        `reasoning` counts only from the question; a path from another node has that node's. Steps after different
        reasoning or other hidden tokens are different nodes.

        The whole text is split into steps, not only the completion: a blank first step extends the step before it, so
        the path then belongs below another node, which may already exist.
        """
        whole = self.whole_text(start, completion)
        steps = split_steps(whole, self.delimiter)
        is_long = len(steps) > self.max_steps
        if is_long:
            steps[self.max_steps - 1 :] = [self.delimiter.join(steps[self.max_steps - 1 :])]
        node, nodes, above = ROOT, [], self._down_to(start)
        reasoning = reasoning if start == ROOT else self.nodes[start].reasoning
        for depth, text in enumerate(steps):
            leaf = depth == len(steps) - 1
            is_above = depth < len(above) and not leaf and self.nodes[above[depth]].text == text
            child = above[depth] if is_above else self._child(node, generated, reasoning, text, leaf)
            if depth >= self.nodes[start].depth:  # steps above were not sampled
                self.nodes[node].drawn[child] += 1
            node = child
            nodes.append(node)
        self.nodes[node].visits += 1
        self.nodes[node].hits += correct
        self.paths.append(Path(tuple(nodes), whole, answer, correct, cut, is_long, reasoning, failure))

    def open_nodes(self, depth: int | None = None) -> list[int]:
        """The nodes that can be continued, except the question; at one depth if given."""
        return [
            number
            for number, node in enumerate(self.nodes)
            if number != ROOT and not node.leaf and depth in (None, node.depth)
        ]

    def n_drawn(self, node: int) -> int:
        """The number of samples, from a node or above it, that passed through it."""
        return sum(self.nodes[node].drawn.values())

    def values(self) -> list[tuple[float, int]]:
        """Each node's value, and the number of completions that it is based on.

        The value is the share of right answers among completions sampled for the node. Without these it is the mean of
        the children's values, weighted by how often they were drawn, over all paths below.
        """
        found = [(0.0, 0)] * len(self.nodes)
        for number in range(len(self.nodes) - 1, -1, -1):  # children come after their parent
            node = self.nodes[number]
            if node.visits:
                found[number] = (node.hits / node.visits, node.visits)
            elif node.drawn:
                total = sum(found[child][0] * count for child, count in node.drawn.items())
                found[number] = (total / self.n_drawn(number), sum(found[child][1] for child in node.drawn))
        return found

    def weights(self) -> list[Fraction]:
        """Each path's share of the independent samples; the shares add up to 1.

        Independent paths have equal shares. In a tree, a node's share is divided among its children by how often each
        was drawn from it, and a leaf's among its paths; so for any property, the total weight of the paths that have it
        is an unbiased estimate. A path has weight 0 if its step became longer than the step it was drawn from.
        """
        parts = [Fraction(number == ROOT) for number in range(len(self.nodes))]
        for number, node in enumerate(self.nodes):
            for child, count in node.drawn.items():  # children come after their parent
                parts[child] = parts[number] * Fraction(count, self.n_drawn(number))
        ends = Counter(path.nodes[-1] for path in self.paths)
        return [parts[path.nodes[-1]] / ends[path.nodes[-1]] for path in self.paths]

    def draws(self) -> list[int]:
        """How often each node was drawn from its parent; 0 for the question, and for a step that extends another."""
        found = [0] * len(self.nodes)
        for node in self.nodes:
            for child, count in node.drawn.items():
                found[child] = count
        return found

    def _down_to(self, node: int) -> list[int]:
        """The nodes from a first step to this node; [] for the question."""
        found: list[int] = []
        while node != ROOT:
            found.append(node)
            node = self.nodes[node].parent
        return found[::-1]

    def _child(self, parent: int, generated: Generated, reasoning: str, text: str, leaf: bool) -> int:
        # A server returns no tokens: only the text of the reasoning distinguishes paths then.
        above, key = self.nodes[parent], (generated.hidden, reasoning, text, leaf)
        number = above.children.get(key)
        if number is None:
            number = above.children[key] = len(self.nodes)
            prefix = "" if leaf else above.prefix + text + self.delimiter
            self.nodes.append(Node(parent, above.depth + 1, text, leaf, prefix, generated, reasoning))
        return number


def split_steps(text: str, delimiter: str) -> list[str]:
    """The steps of a text; `delimiter.join` restores it. A blank piece belongs to the step before it."""
    steps: list[str] = []
    for piece in text.split(delimiter):
        if steps and (not piece.strip() or not steps[-1].strip()):
            steps[-1] += delimiter + piece
        else:
            steps.append(piece)
    return steps


def prefix_key(prefix: str, hidden: Sequence[int]) -> int:
    """A 63-bit hash of an answer's prefix and its hidden tokens, for the keys of its samples."""
    begun = b"".join(token.to_bytes(4, "little") for token in hidden) + prefix.encode()
    return int.from_bytes(hashlib.blake2b(begun, digest_size=8).digest(), "little") >> 1
