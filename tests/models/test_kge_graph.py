"""Dictionaries, triples and labels: what is read, and the sentence for what is wrong."""

import json
import re

import numpy as np
import pytest

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.workloads.tracin.kge import graph

ENTITIES = {"CHEBI:1": 4, "CHEBI:22": 0, "MONDO:7": 9}
RELATIONS = {"predicate:0": 1, "predicate:27": 0}


@pytest.fixture
def dictionaries(tmp_path):
    """Files with gaps in the ids, one of them written on Windows, with a byte order mark."""
    content = "".join(f"{k}\t{v}\r\n" for k, v in ENTITIES.items()).encode("utf-8-sig")
    (tmp_path / "node_dict.txt").write_bytes(content)
    (tmp_path / "rel_dict.txt").write_text("".join(f"{k}\t{v}\n" for k, v in RELATIONS.items()))
    return [graph.read_dictionary(tmp_path / name) for name in ("node_dict.txt", "rel_dict.txt")]


def triples_file(tmp_path, *lines, end="\n"):
    path = tmp_path / "train.txt"
    path.write_bytes("".join(f"{line}{end}" for line in lines).encode())
    return path


GOOD = "CHEBI:1\tpredicate:27\tMONDO:7"
OTHER = "MONDO:7\tpredicate:0\tCHEBI:22"


def test_a_dictionary_may_have_gaps_in_its_ids(dictionaries):
    entities, relations = dictionaries
    assert (entities.ids, entities.size, entities.names[9]) == (ENTITIES, 10, "MONDO:7")
    assert (relations.size, relations.names) == (2, {1: "predicate:0", 0: "predicate:27"})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a\t0\nb\t1\na\t2\n", "line 3: expected each name once, found 'a' again, as in line 1"),
        ("a\t0\nb\t0\n", "line 2: expected each id once, found 0 again, as in line 1"),
        ("a\t0\n\nb\t1\n", "line 2: expected a name, a tab and an id such as 17, found an empty line"),
        ("a\t0\nb 1\n", "line 2: .* found 'b 1'"),
        ("0\ta\n1\tb\n", r"line 1: .* found '0\\ta'. The ids come first; swap the columns with: awk"),
        ("a\tb\n", "line 1: .* found 'a\\\\tb'"),
        ("a\t-1\n", "line 1: .* found 'a\\\\t-1'"),
        ("", "is empty; expected lines of a name, a tab and an id"),
        (b"a\t0\n\xff\t1\n", "line 2: expected UTF-8, found the byte 0xff"),
    ],
)
def test_a_malformed_dictionary_is_refused_with_file_and_line(tmp_path, content, message):
    path = tmp_path / "node_dict.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SlurmGPUError, match=f"{re.escape(str(path))}.*{message}"):
        graph.read_dictionary(path)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_row_i_is_line_i_and_a_line_that_is_there_twice_is_two_rows(tmp_path, dictionaries, end):
    path = triples_file(tmp_path, OTHER, GOOD, OTHER, GOOD, end=end)
    found = graph.read_triples(path, *dictionaries)
    assert found.dtype == np.int64
    assert found.tolist() == [[9, 1, 0], [4, 0, 9], [9, 1, 0], [4, 0, 9]]


def test_the_last_line_may_have_no_end(tmp_path, dictionaries):
    path = tmp_path / "train.txt"
    path.write_text(f"{GOOD}\n{OTHER}")
    assert len(graph.read_triples(path, *dictionaries)) == 2


WRONG = [
    ("CHEBI:1\tpredicate:27\tMONDO:8", "3 names.*as tail, found 'MONDO:8'. Did you mean 'MONDO:7'?"),
    ("CHEBI:l\tpredicate:27\tMONDO:7", "3 names.*as head, found 'CHEBI:l'. Did you mean 'CHEBI:1'?"),
    ("CHEBI:1\ttreats\tMONDO:7", "2 names of .*rel_dict.txt as relation, found 'treats'.$"),
    ("CHEBI:1 predicate:27 MONDO:7", "separated by tabs, found no tab in 'CHEBI:1 predicate:27 MONDO:7'"),
    (f"{GOOD}\t0.5", "separated by tabs, found 4 fields"),
    ("CHEBI:1\tpredicate:27", "separated by tabs, found 2 fields"),
    ("", "found an empty line"),
]


@pytest.mark.parametrize(("line", "message"), WRONG)
def test_a_wrong_line_is_refused_with_its_number(tmp_path, dictionaries, line, message):
    path = triples_file(tmp_path, GOOD, OTHER, line, GOOD)
    expected = f"{re.escape(str(path))}, line 3: .*{message.removesuffix('$')} ?.*Correct it and plan again."
    with pytest.raises(SlurmGPUError, match=expected):
        graph.read_triples(path, *dictionaries)
    with pytest.raises(ItemError, match=message):
        graph.parse_triple(line, *dictionaries)


@pytest.mark.parametrize(("n_more", "said"), [(1, "One more line is wrong"), (3, "3 more lines are wrong")])
def test_how_many_more_lines_are_wrong_is_said(tmp_path, dictionaries, n_more, said):
    path = triples_file(tmp_path, GOOD, *["nobody\tpredicate:0\tMONDO:7"] * (1 + n_more), OTHER)
    with pytest.raises(SlurmGPUError, match=rf"line 2: .*found 'nobody'\. {said}"):
        graph.read_triples(path, *dictionaries)


def test_an_item_is_parsed_as_a_line_is(dictionaries):
    assert graph.parse_triple(GOOD, *dictionaries) == (4, 0, 9)
    assert graph.triple_of("MONDO:7", "predicate:0", "CHEBI:22", *dictionaries) == (9, 1, 0)


def test_a_graph_holds_the_triples_and_a_digest_of_each_file(tmp_path, dictionaries):
    path = triples_file(tmp_path, GOOD, OTHER)
    files = [path, tmp_path / "node_dict.txt", tmp_path / "rel_dict.txt"]
    found = graph.read_graph(*files)
    assert found.train.tolist() == [[4, 0, 9], [9, 1, 0]]
    assert [*found.digests] == [str(file) for file in files]
    triples_file(tmp_path, OTHER, GOOD)
    other = graph.read_graph(*files)
    assert [found.digests[str(file)] == other.digests[str(file)] for file in files] == [False, True, True]


def test_an_empty_training_file_and_a_missing_one_are_refused(tmp_path, dictionaries):
    files = [tmp_path / "node_dict.txt", tmp_path / "rel_dict.txt"]
    with pytest.raises(SlurmGPUError, match=r"train\.txt is empty; expected training triples"):
        graph.read_graph(triples_file(tmp_path), *files)
    with pytest.raises(SlurmGPUError, match=r"Cannot read .*elsewhere\.txt: No such file"):
        graph.read_graph(tmp_path / "elsewhere.txt", *files)


def test_labels_of_entities_may_be_alike_and_ids_may_not(tmp_path):
    path = tmp_path / "node_name_dict.txt"
    path.write_text("aspirin\t4\nfever\t9\naspirin\t0\n")
    assert graph.read_names(path) == {4: "aspirin", 9: "fever", 0: "aspirin"}
    path.write_text("aspirin\t4\nfever\t4\n")
    with pytest.raises(SlurmGPUError, match="line 2: expected each id once, found 4 again, for 'aspirin' and 'fever'"):
        graph.read_names(path)


def test_a_relations_label_is_its_predicate_and_a_key_that_is_no_json_its_own(tmp_path):
    path = tmp_path / "edge_map.json"
    treats = json.dumps({"predicate": "biolink:treats", "qualifiers": []})
    path.write_text(
        json.dumps({treats: "predicate:27", "is_a": "predicate:0", "{}": "predicate:3", "7": "predicate:4"})
    )
    assert graph.read_edge_map(path) == {
        "predicate:27": "biolink:treats",
        "predicate:0": "is_a",
        "predicate:3": "{}",
        "predicate:4": "7",
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "found no JSON"),
        ("[1]", "found other JSON"),
        ('{"a": 1}', "other JSON"),
        ('{"a": "r", "b": "r"}', "'r' twice"),
    ],
)
def test_an_edge_map_that_is_none_is_refused(tmp_path, content, message):
    path = tmp_path / "edge_map.json"
    path.write_text(content)
    with pytest.raises(SlurmGPUError, match=message):
        graph.read_edge_map(path)
