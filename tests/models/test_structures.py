"""Answers of a given form: what is refused, what a model says under one, and what rows have of it."""

import json
import math
import re
import sys

import numpy as np
import pytest

pytest.importorskip("transformers")

import llguidance
import torch

import slurmgpu as slurmgpu_package
from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.llm.engines import open_engine
from slurmgpu.llm.interface.engine import EngineOptions, Output, Place, Prompt, Request, Sampling
from slurmgpu.llm.models.source import find_model
from slurmgpu.llm.prompts.codec import Codec
from slurmgpu.llm.prompts.encoded import Encoded
from slurmgpu.llm.prompts.structures import check_structure, lark_of, structure_of
from slurmgpu.llm.transformers_engine.grammars import Grammars, Matcher
from slurmgpu.shards.columns import Array, Json, Text, convert_row
from slurmgpu.workload import Item, Share
from slurmgpu.workloads.classify.workload import Classify
from slurmgpu.workloads.generate.workload import Generate
from slurmgpu.workloads.structured import Property, properties_of
from tests.support.byte_models import HARMONY, THINKING, make_byte_llama, make_byte_tokenizer
from tests.support.engines import load_on_cpu
from tests.support.nightly import by_night
from tests.support.runs import datasets
from tests.support.tiny_models import sum_steps

pytestmark = pytest.mark.usefixtures("one_thread")

ONE_THREAD = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

PERSON = {
    "type": "object",
    "properties": {
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "height": {"type": "number", "minimum": 0, "maximum": 3},
        "name": {"type": "string", "maxLength": 6},
        "glad": {"type": "boolean"},
        "color": {"$ref": "#/$defs/Color"},
        "words": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
        "weight": {"anyOf": [{"type": "number", "minimum": 0, "maximum": 200}, {"type": "null"}]},
        "nick": {"type": "string", "maxLength": 3},
    },
    "required": ["age", "height", "name", "glad", "color", "words", "weight"],
    "$defs": {"Color": {"enum": ["red", "blue"]}},
}
STEPS = r"\d\+\d\+0=\d{1,2}\n\d\+\d\+[01]=\d{1,2}\n#\d{2,3}"


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory):
    """A random model that can write any bytes, and does."""
    return make_byte_llama(tmp_path_factory.mktemp("bytes"))


def loaded(model, **settings):
    return load_on_cpu(Generate(**{"model": str(model), "precision": "fp32", **settings}))


# Planning


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"regex": "a", "choices": ["a"]}, "choices and regex are both set; an answer can have only one form."),
        ({"schema": "{"}, "schema is '{', which is not JSON (Expecting"),
        ({"schema": "[1]"}, "schema is [1]; expected a JSON schema, which is a table."),
        ({"choices": []}, "choices is []; expected different texts, none of them empty."),
        ({"choices": ["a", "a"]}, "choices is ['a', 'a']; expected different texts"),
        ({"regex": "a("}, 'regex cannot be used; llguidance says: invalid regex "a("'),
        ({"schema": {"not": {}}}, "schema cannot be used; llguidance says: failed to compile JSON schema: Unimpl"),
        ({"grammar": "start: b"}, 'grammar cannot be used; llguidance says: at 1(8): unknown name: "b"'),
        ({"grammar": "any words"}, "grammar is neither Lark nor GBNF; llguidance says: Expected ::="),
        ({"regex": "a", "stop": ["\n"]}, "stop is set, but regex already defines where an answer ends"),
        ({"schema": {"properties": {"text": {}}}}, "schema has the property 'text', but there is already a"),
        ({"schema": {"properties": {"id": {}}}, "keep": ["id"]}, "schema has the property 'id', but there is already"),
    ],
)
def test_what_no_answer_could_be_kept_to_is_refused_at_planning(bytewise, settings, sentence):
    with pytest.raises(SlurmGPUError) as raised:
        Generate(model=str(bytewise), prompt="{a}", **settings).place(Share(0))
    assert sentence in str(raised.value)
    assert "%llguidance" not in str(raised.value)


def test_an_engine_or_a_machine_that_lacks_it_is_named(bytewise, monkeypatch):
    with pytest.raises(
        SlurmGPUError, match="regex is set, and engine = 'abacus' does not support it; expected engine = 'tr"
    ):
        check_structure(structure_of(regex="a"), "abacus", ())
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(SlurmGPUError, match=r"need the package llguidance.* pip install 'slurmgpu\[structured\]'"):
        Generate(model=str(bytewise), prompt="{a}", regex="a").place(Share(0))
    Generate(model=str(bytewise), prompt="{a}", regex="a")  # as a merge does


def test_a_grammar_is_lark_or_gbnf_and_may_have_any_names():
    gbnf = structure_of(grammar='root ::= "a" digits\ndigits ::= [0-9]+\n')
    lark = structure_of(grammar='start: answer " start /"  // start\nanswer: /start[a-z]+/\n')
    for structure, good, bad in ((gbnf, "a12", "b"), (lark, "startx start /", "answer")):
        check_structure(structure, "vllm", ())
        for text, is_good in ((good, True), (bad, False)):
            matcher = byte_matcher(lark_of(structure))
            n_taken = matcher.llguidance.try_consume_tokens([*map(TOKENS.index, text.encode())])
            assert (n_taken == len(text) and matcher.llguidance.is_accepting()) == is_good


TOKENS = [*range(256), None]


def byte_matcher(lark):
    class Bytes:
        eos_token_id, bos_token_id = 256, None
        tokens = [*(bytes([number]) for number in range(256)), b"<end>"]
        special_token_ids = [256]

        def __call__(self, text):
            return [*text.encode()]

    made = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()))
    return Matcher(llguidance.LLMatcher(made, lark), [256])


def test_json_has_no_more_white_space_than_python_writes_and_no_unnamed_properties():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
    lark = lark_of(structure_of(schema=schema))
    for text, n_allowed in (
        ('{"a": 1, "b": 2}', 16),
        ('{ "a": 1}', 1),
        ('{"a":  1}', 6),
        ('{"a": 1,\n', 8),
        ('{"c": 1', 2),
    ):
        taken = byte_matcher(lark).llguidance.try_consume_tokens([*text.encode()])
        assert (text, taken) == (text, n_allowed)


def test_properties_know_their_types():
    found = properties_of(PERSON | {"x-guidance": {}})
    assert {name: (each.type, each.is_optional) for name, each in found.items()} == {
        "age": ("integer", False),
        "height": ("number", False),
        "name": ("string", False),
        "glad": ("boolean", False),
        "color": ("string", False),
        "words": ("json", False),
        "weight": ("number", True),
        "nick": ("string", True),
    }
    for schema, wanted in [
        ({"const": 3}, ("integer", False)),
        ({"enum": [1, 2.5]}, ("number", False)),
        ({"enum": ["a", None]}, ("string", True)),
        ({"type": ["boolean", "null"]}, ("boolean", True)),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, ("json", False)),
        ({"$ref": "#/nowhere"}, ("json", False)),
        ({}, ("json", False)),
    ]:
        [each] = properties_of({"properties": {"p": schema}, "required": ["p"]}).values()
        assert (each.type, each.is_optional) == wanted
    assert properties_of({"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"p": {}}}}}) == {
        "p": Property("json", True)
    }
    assert properties_of({"type": "integer"}) == {}
    again = {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]}
    itself = {"anyOf": [{"$ref": "#/$defs/B"}, {"$ref": "#/$defs/B"}]}
    schema = {"properties": {"p": again, "q": itself}, "$defs": {"A": again, "B": itself}}
    assert properties_of(schema) == {"p": Property("integer", True), "q": Property("json", True)}


# Rows


class Says:
    """An engine that gives these answers."""

    def __init__(self, *texts, reason="stop"):
        self.texts, self.reason = texts, reason

    def generate(self, requests):
        for request, text in zip(requests, self.texts, strict=True):
            yield Output(request.id, text, finish_reason=self.reason)


def test_an_answer_that_breaks_its_schema_is_its_items_error(bytewise):
    workload = Generate(model=str(bytewise), prompt="{a}", schema=PERSON, max_tokens=9)
    person = {"age": 3, "height": 1, "name": "x", "glad": True, "color": "red", "words": [], "weight": None}
    cases = [
        (person, None),
        ('{"age": 3, "hei', "the answer is not JSON of the schema: Unterminated string"),
        ("", "the answer is not JSON of the schema: Expecting value"),
        ("[1]", "the answer is JSON, but not an object, as the schema requires: '[1]'"),
        ({**person, "age": 2**63}, "property 'age' of the answer is 9223372036854775808, beyond what int64 holds"),
        ({**person, "name": "\ud800"}, "the answer is not JSON of the schema: 'utf-8' codec can't encode"),
        ("[" * 100_000, "the answer is not JSON of the schema: "),
        (json.dumps(person).replace('"height": 1', f'"height": 1{"0" * 400}'), "beyond what float64 holds"),
        ({"age": 3}, "the answer lacks the property 'height' of the schema"),
        (json.dumps(person).replace('"height": 1', '"height": 1e999'), "beyond what float64 holds"),
    ]
    workload.engine = Says(*(said if isinstance(said, str) else json.dumps(said) for said, _ in cases))
    rows = workload([Item(i, {"a": i}) for i in range(len(cases))])
    for row, (_, sentence) in zip(rows, cases, strict=True):
        assert isinstance(row, ItemError) == (sentence is not None)
        assert sentence is None or sentence in str(row)
    workload.engine = Says(json.dumps(person), reason="length")
    [cut] = workload([Item(0, {"a": 0})])
    assert str(cut) == "the answer was cut at max_tokens = 9, before its schema was complete"


def test_columns_have_the_types_of_the_properties_for_one_answer_and_for_several(bytewise):
    one = Generate(model=str(bytewise), prompt="{a}", schema=json.dumps(PERSON))
    kinds = {
        "age": Array("int64"),
        "height": Array("float64"),
        "name": Text(),
        "glad": Array("bool"),
        "color": Text(),
        "words": Json(),
        "weight": Array("float64", nan_is_unknown=True),
        "nick": Json(),
    }
    assert {name: one.columns[name] for name in kinds} == kinds
    several = Generate(model=str(bytewise), prompt="{a}", schema=PERSON, n=2, temperature=1.0)
    assert {name: several.columns[name] for name in ("age", "glad", "name", "weight")} == {
        "age": Array("int64", (2,)),
        "glad": Array("bool", (2,)),
        "name": Json(),
        "weight": Array("float64", (2,), nan_is_unknown=True),
    }
    first = {"age": 3, "height": 1, "name": "x", "glad": True, "color": "red", "words": ["a"], "weight": None}
    second = {**first, "age": 4, "weight": 2.5, "nick": "y"}
    several.engine = Says(json.dumps(first), json.dumps(second))
    [row] = several([Item(0, {"a": 0})])
    stored = convert_row(several.columns, row)
    assert stored["age"].tolist() == [3, 4]
    assert math.isnan(stored["weight"][0])
    assert stored["weight"][1] == 2.5
    assert json.loads(stored["nick"]) == [None, "y"]


# Models


@pytest.mark.model
def test_a_model_that_can_add_adds_under_a_regex_and_says_nothing_else(adder):
    items = [Item(i, {"q": f"{i + 12}+{85 - i}="}) for i in range(24)]
    free = loaded(adder, prompt="{q}", max_tokens=40)(items)
    kept = loaded(adder, prompt="{q}", max_tokens=40, regex=STEPS)(items)
    assert [row["text"] for row in kept] == [row["text"] for row in free]
    assert free[0]["text"] == sum_steps(12, 85)
    # Of what it would never say it says the likeliest; its log-probabilities are its own.
    asked = {"prompt": ":they are {w}", "logprobs": True, "max_tokens": 8}
    [bad, good] = loaded(adder, choices=["okay", "hatred"], **asked)([Item(0, {"w": "scum"}), Item(1, {"w": "kind"})])
    assert (bad["text"], good["text"]) == ("hatred", "okay")
    assert bad["logprobs"][:3].min() > -0.01  # as in "hate"
    assert bad["logprobs"][3] < -5
    wild = {"max_tokens": 60, "temperature": 3.0, "n": 3}
    rows = loaded(adder, prompt="{q}", regex=STEPS, **wild)(items)
    texts = [text for row in rows for text in row["text"]]
    assert all(re.fullmatch(STEPS, text) for text in texts)
    assert len({*texts}) > 40


def requests_of(structures, n=12, max_tokens=200):
    rules = [{}, {"temperature": 1.0}, {"temperature": 2.0, "top_k": 20, "top_p": 0.9}]
    return [
        Request(
            i,
            Prompt("ab" * (i % 5) + str(i)),
            Sampling(max_tokens=max_tokens, structure=structures[i % len(structures)], **rules[i % 3]),
            key=i,
        )
        for i in range(n)
    ]


def opened(folder, **options):
    """A function that gives an engine's answers to requests, in their order."""
    notes = {}
    place = Place("cpu", note=notes.__setitem__)
    engine = open_engine(EngineOptions(find_model(str(folder)), precision="fp32", **options), place)

    def answers(asked):
        found = {output.id: output for output in engine.generate(asked)}
        assert "static_batches" not in notes  # continuous batching was not given up
        return [found[i] for i in range(len(asked))]

    return answers


@pytest.mark.model
def test_a_schema_holds_in_every_batch_with_the_same_tokens(bytewise):
    structures = [
        structure_of(schema=PERSON),
        structure_of(choices=["yes", "no"]),
        None,
        structure_of(regex="[a-c]{2,9}"),
    ]
    asked = requests_of(structures)
    ways = [{"batching": "static"}, {"batching": "static", "batch_tokens": 230}, {"batching": "continuous"}]
    found = [opened(bytewise, **way)(asked) for way in ways]
    tokens = [[output.tokens.tolist() for output in outputs] for outputs in found]
    assert tokens[0] == tokens[1] == tokens[2]
    for output in found[0]:
        structure = asked[output.id].sampling.structure
        if structure is None:
            continue
        assert (output.finish_reason, output.error) == ("stop", None)
        if structure.kind == "schema":
            value = json.loads(output.text)
            assert output.text == json.dumps(value, ensure_ascii=False) or "\\" in output.text
            assert {*PERSON["required"]} <= value.keys() <= PERSON["properties"].keys()
            assert 0 <= value["age"] <= 150
            assert len(value["name"]) <= 6
    assert {found[0][i].text for i in (1, 5, 9)} <= {"yes", "no"}
    assert len({tuple(each) for each in tokens[0]}) >= len(asked) - 1


@pytest.mark.model
def test_a_row_that_the_library_cannot_follow_is_that_rows_error(bytewise, monkeypatch):
    follow = Grammars.follow

    def limited(self, grammar):
        matcher = follow(self, grammar)
        if "[ab]" in grammar:
            matcher.llguidance.consume_token(255)
        return matcher

    monkeypatch.setattr(Grammars, "follow", limited)
    bad, good = structure_of(regex="[ab]{3}"), structure_of(regex="[cd]{3}")
    for batching in ("static", "continuous"):
        with_engine = opened(bytewise, batching=batching)
        assert {output.finish_reason for output in with_engine(requests_of([good], n=4))} == {"stop"}
        found = with_engine(requests_of([bad, good], n=4))
        assert [output.finish_reason for output in found] == ["error", "stop", "error", "stop"]
        assert found[0].error.startswith("its structure cannot be followed further; llguidance says:")
        assert re.fullmatch("[cd]{3}", found[1].text)


# Reasoning


def grammars(tmp_path, marks, template=None, prompt=""):
    """The grammars of a model with these marks, and a request whose prompt ends with `prompt`."""
    tokenizer = make_byte_tokenizer(tmp_path, marks, template)
    options = EngineOptions(find_model(str(make_byte_llama(tmp_path, marks, template))))
    codec = Codec(tokenizer, options, 512)
    made = Grammars(tokenizer, codec, [tokenizer.eos_token_id], len(tokenizer) + 3)
    sampling = Sampling(max_tokens=99, structure=structure_of(regex="[0-9]+"))
    return tokenizer, made, codec.encode(Request(0, Prompt("x" + prompt), sampling))


def allowed(tokenizer, made, encoded, text):
    """The tokens that may follow a text, in words."""
    matcher = made.start(encoded)
    for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
        matcher.take(token)
        assert matcher.error is None
    [row] = made.allowed([matcher], torch.device("cpu"))
    return tokenizer.decode(np.flatnonzero(row.numpy()).tolist())


DIGITS = "0123456789"


@pytest.mark.parametrize(
    ("template", "before", "after"),
    [
        ("{{ messages[0].content }}", {"": DIGITS + "<think>", "1": DIGITS + "<|return|>"}, "<think>so 4 {</think>"),
        ("{{ messages[0].content }}<think>\n", {}, "so 4 <think> {</think>"),
        ("{{ messages[0].content }}<think>\n\n</think>\n\n", {}, ""),
    ],
)
def test_reasoning_is_left_alone_and_the_form_begins_behind_it(tmp_path, template, before, after):
    tokenizer, made, encoded = grammars(tmp_path, THINKING, template)
    for text, wanted in before.items():
        assert allowed(tokenizer, made, encoded, text) == wanted
    for end in range(7, len(after) - len("</think>")):
        assert len(allowed(tokenizer, made, encoded, after[:end])) > 250  # all but the end of the answer
    assert allowed(tokenizer, made, encoded, after) == DIGITS
    assert allowed(tokenizer, made, encoded, after + "12") == DIGITS + "<|return|>"


def test_in_openais_channels_the_form_is_that_of_the_final_one(tmp_path):
    template = "{{ messages[0].content }}<|start|>assistant"
    tokenizer, made, encoded = grammars(tmp_path, HARMONY, template)
    # Of "assistant" each byte is a token here, and one of a large model's is the whole word.
    encoded = Encoded(encoded.request, encoded.tokens[: -len("assistant")])
    assert allowed(tokenizer, made, encoded, "") == "<|channel|>"
    thought = "<|channel|>analysis<|message|>so 4 {"
    assert len(allowed(tokenizer, made, encoded, thought)) > 250
    final = "<|end|><|start|>assistant<|channel|>final<|message|>"
    assert allowed(tokenizer, made, encoded, thought + final) == DIGITS
    assert (
        allowed(tokenizer, made, encoded, final.removeprefix("<|end|><|start|>assistant") + "7")
        == DIGITS + "<|return|>"
    )


# Runs


@pytest.mark.model
@pytest.mark.parametrize("how", [("debug",), by_night(("local", "--tasks", "1", "--inject", "kill@5"))])
def test_structured_rows_are_the_same_in_other_batches_and_cut_ones_are_missing_alone(project, slurmgpu, bytewise, how):
    """A worker of its own imports transformers, which takes longer than all else here: by night, after a kill."""
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    settings = {"model": str(bytewise), "prompt": "{x}", "temperature": 1.0, "max_tokens": 16, "precision": "fp32"}
    folder = project(16, batch_size=4, settings={**settings, "schema": "file:form.json"}, seed=3)
    (folder / "form.json").write_text(json.dumps(schema))
    text = (folder / "slurmgpu.toml").read_text().replace("workloads.py:Rows", "generate")
    submit = ("submit", "--gpus", "0", "--executor")
    for batch_size, words in ((4, ("debug", "--run-dir", "one/run")), (3, (*how, "--run-dir", "two/run"))):
        (folder / "slurmgpu.toml").write_text(text.replace("batch_size = 4", f"batch_size = {batch_size}"))
        slurmgpu(*submit, *words, cwd=folder, expect=0, **ONE_THREAD)
    assert datasets(folder / "one") == datasets(folder / "two")
    with slurmgpu_package.open(folder / "one/run/merged.h5") as merged:
        assert merged["age"].dtype == np.int64
        rows = [*zip(merged.failed, merged["text"], merged["age"], strict=True)]
    assert 0 < sum(failed for failed, *_ in rows) < 16
    assert all((text, age) == ("", 0) if failed else text == f'{{"age": {age}}}' for failed, text, age in rows)


def test_a_free_answer_is_kept_to_the_labels_it_may_name_and_each_is_its_label(bytewise):
    """By texts of their own, or as a field of JSON."""
    items = [Item(number, {"text": "x" * number + "?"}, 3) for number in range(6)]

    def rows_of(**settings):
        workload = Classify(
            model=str(bytewise), labels=["hate", "ok"], prompt="{text}", method="parse", precision="fp32", **settings
        )
        workload.place(Share(0))
        load_on_cpu(workload)
        return workload(items)

    assert [row["parse_ok"] for row in rows_of(max_tokens=8)] == [False] * 6  # a random model names no label
    rows = rows_of(choices=["[A]", "[B]"], max_tokens=8)
    assert all(row["parse_ok"] and row["finish_reason"] == "stop" for row in rows)
    assert [row["label"] for row in rows] == [{"[A]": "hate", "[B]": "ok"}[row["raw"]] for row in rows]
    schema = {"type": "object", "properties": {"label": {"enum": ["hate", "ok"]}}, "required": ["label"]}
    rows = rows_of(schema=schema, json="label", max_tokens=40)
    assert [json.loads(row["raw"])["label"] for row in rows] == [row["label"] for row in rows]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"regex": "a|b"}, "regex is set, and method is 'score'"),
        ({"method": "parse", "choices": ["a", "b"], "regex": "a"}, "choices and regex are both set"),
        ({"method": "parse", "choices": ["a"]}, "choices has 1 texts for 2 labels"),
        ({"method": "parse", "length_normalize": True}, "length_normalize is set, and method is 'parse'"),
    ],
)
def test_a_form_that_labels_cannot_have_is_refused(bytewise, settings, said):
    with pytest.raises(SlurmGPUError, match=said):
        Classify(model=str(bytewise), labels=["hate", "ok"], prompt="{text}", **settings)
