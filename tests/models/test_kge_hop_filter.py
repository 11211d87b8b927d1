"""The filter by hops and degree, against its rules written out one by one on random graphs."""

import itertools

import numpy as np
import pytest

from slurmgpu.workloads.tracin.kge.hop_filter import HopFilter, HopFilterOptions

N = 14


def graph(seed, n=26):
    """Random triples with self-loops, doubles and entities that nothing touches."""
    draw = np.random.default_rng(seed)
    triples = np.stack([draw.integers(0, N - 2, n), draw.integers(0, 3, n), draw.integers(0, N - 2, n)], axis=1)
    return np.concatenate([triples, triples[:2], [[3, 0, 3]]])


def distances(train, source):
    """By breadth-first search; who cannot be reached is not there."""
    found, layer, hops = {source: 0}, [source], 0
    while layer:
        hops += 1
        touched = {b for h, _, t in train.tolist() for a, b in ((h, t), (t, h)) if a in layer}
        layer = [node for node in touched if node not in found]
        found.update(dict.fromkeys(layer, hops))
    return found


def keeps(train, test, edge, options):
    """The rules, as docs/reference says them."""
    h, _, t = test
    far = options.n_hops + 1
    from_h = {node: d for node, d in distances(train, h).items() if d < far}
    from_t = {node: d for node, d in distances(train, t).items() if d < far}
    near = (from_h.keys() & from_t.keys()) | {h, t}
    u, _, v = edge
    if u not in near or v not in near:
        return False

    def degree(node):
        neighbours = {b for x, _, y in train.tolist() for a, b in ((x, y), (y, x)) if a == node}
        return sum(any(node in within and other in within for within in (from_h, from_t)) for other in neighbours)

    def on_path(a, b):
        if any(node not in within for node in (a, b) for within in (from_h, from_t)):
            return False
        longest = options.max_total_path_length
        is_short = longest is None or from_h[a] + from_t[b] <= longest
        return from_h[a] <= from_h[b] and from_t[b] <= from_t[a] and is_short

    touches = options.preserve_test_edges and bool({u, v} & {h, t})
    important = touches or max(degree(u), degree(v)) >= options.min_degree
    if options.strict_path_filtering:
        important = True
    return important and (not options.path_filtering or on_path(u, v) or on_path(v, u))


OPTIONS = [
    *(
        HopFilterOptions(n_hops=hops, min_degree=degree, preserve_test_edges=preserved)
        for hops, degree, preserved in itertools.product((1, 2, 3), (0, 2, 3, 5, 40), (True, False))
    ),
    *(
        HopFilterOptions(n_hops=hops, path_filtering=True, max_total_path_length=longest, strict_path_filtering=strict)
        for hops, longest, strict in itertools.product((1, 2, 3), (None, 0, 2, 3, 9), (True, False))
    ),
]


@pytest.mark.parametrize("seed", range(3))
def test_the_mask_keeps_what_each_rule_keeps(seed):
    train = graph(seed)
    tests = np.stack([np.arange(0, N), np.zeros(N, int), (np.arange(0, N) * 5 + seed) % N], axis=1)
    for options in OPTIONS[seed::3]:
        expected = [[keeps(train, test, edge, options) for edge in train.tolist()] for test in tests.tolist()]
        found = HopFilter(train, N, options).mask(tests)(np.arange(len(train)))
        assert found.tolist() == expected, options


def test_the_random_graphs_tell_the_rules_apart():
    """Else the test above would show little: every option decides about some triple."""
    train = graph(0)
    tests = np.stack([np.arange(0, N), np.zeros(N, int), np.arange(0, N)[::-1]], axis=1)

    def kept(**options):
        return HopFilter(train, N, HopFilterOptions(**options)).mask(tests)(np.arange(len(train))).sum()

    counts = [
        kept(n_hops=1),
        kept(n_hops=2),
        kept(n_hops=2, min_degree=5),
        kept(n_hops=2, min_degree=5, preserve_test_edges=False),
        kept(n_hops=2, path_filtering=True),
        kept(n_hops=2, path_filtering=True, max_total_path_length=1),
    ]
    assert len(set(counts)) == len(counts)
    assert kept(min_degree=5, path_filtering=True) < kept(path_filtering=True, strict_path_filtering=True)
    assert 0 < min(counts) <= max(counts) < len(train) * N


def test_more_than_64_test_triples_and_any_lines_in_any_order():
    train = graph(1)
    draw = np.random.default_rng(0)
    tests = draw.integers(0, N, (150, 3))
    lines = draw.integers(0, len(train), 40)
    reach = HopFilter(train, N, HopFilterOptions(min_degree=3))
    whole = reach.mask(tests)(lines)
    assert whole.shape == (150, 40)
    alone = [reach.mask(tests[i : i + 1])(np.arange(len(train)))[0, lines] for i in range(150)]
    assert (whole == np.stack(alone)).all()
