"""Jinja templates, examples before a prompt, and prompts that are too long."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("transformers")

from tokenizers import processors

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.llm.interface.engine import Composed, EngineOptions, Passage, Prompt
from slurmgpu.llm.models.source import find_model
from slurmgpu.llm.prompts.codec import Codec
from slurmgpu.llm.prompts.jinja_templates import JinjaTemplate
from slurmgpu.llm.prompts.templates import Prompts, Template
from slurmgpu.llm.prompts.truncation import shorten
from slurmgpu.llm.prompts.windows import tokens_of
from slurmgpu.workload import Item, Share
from slurmgpu.workloads.classify.workload import Classify
from slurmgpu.workloads.generate.workload import Generate
from tests.support.engines import load_on_cpu
from tests.support.tiny_models import make_llama, make_tokenizer, sum_steps

DATA = {"text": "cats", "n": 3, "half": 0.5, "choices": ["a", "b"], "meta": {"title": "T"}, "no": None, "yes": True}


# Jinja


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("Q: {{ text }}\nA:\n", "Q: cats\nA:\n"),
        ("{{ n }} {{ half }} {{ yes }} {{ choices }} {{ meta }}", '3 0.5 true ["a", "b"] {"title": "T"}'),
        ("{{ choices[0] }}/{{ choices | last }} {{ meta.title | lower }}", "a/b t"),
        ("{% for choice in choices %}{{ loop.index }}. {{ choice }}\n{% endfor %}", "1. a\n2. b\n"),
        ("{% if no %}x{% else %}{{ text if n > 2 else 'dogs' }}{% endif %}", "cats"),
        ("{% set both %}<{{ text }}>{% endset %}{{ both }}{{ more is defined }}", "<cats>false"),
        ("{single} {{ '{{' }}", "{single} {{"),
    ],
)
def test_a_jinja_template_is_filled_in(template, text):
    assert JinjaTemplate(template).render(DATA) == text


def encoded(codec, prompt):
    text, is_whole = codec.render(prompt)
    return codec.tokens_of(text, is_whole=is_whole)


def test_what_comes_from_an_item_is_known_so_that_its_special_tokens_are_text(tmp_path):
    tokenizer = make_tokenizer(tmp_path)
    codec = Codec(tokenizer, EngineOptions(find_model(str(make_llama(tmp_path)))), 2048)
    template = JinjaTemplate("</s>{% set b %}#{{ t }}</s>{% endset %}{{ t }}{{ b }}{% if t %}</s>{% endif %}")
    found = template.render({"t": "a</s>"})
    assert found == "</s>a</s>#a</s></s></s>"
    assert [found[start:stop] for start, stop in found.quoted] == ["a</s>", "#a</s></s>"]
    ends = encoded(codec, Prompt(found)).count(tokenizer.eos_token_id)
    assert ends == 2  # the first and the last
    with pytest.raises(ItemError, match="the item contains U\\+FDD1 or U\\+FDD2"):
        template.render({"t": "a\ufdd2</s>\ufdd1"})
    for cutting in ("truncate(8, True, '')", "reverse"):
        found = JinjaTemplate(f"{{% filter {cutting} %}}A {{{{ t }}}}{{% endfilter %}}").render({"t": "</s>" * 3})
        assert found.quoted == ((0, len(found)),)


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{{ txt }}", "the prompt's template: UndefinedError: 'txt' is undefined"),
        ("{{ text / 2 }}", "the prompt's template: TypeError: unsupported operand"),
        ("{{ no }}", "the prompt's template prints a value that is null"),
        ("{{ text.__class__.__mro__ }}", "the prompt's template: SecurityError: access to attribute '__class__'"),
        ("{{ choices.append('c') }}", "the prompt's template: SecurityError"),
        ("{% for i in range(99999999) %}{% endfor %}{{ text }}", "the prompt's template: OverflowError"),
    ],
)
def test_an_item_for_which_a_template_fails_is_an_error_of_that_item(template, sentence):
    with pytest.raises(ItemError) as raised:
        JinjaTemplate(template).render(DATA)
    assert sentence in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"prompt": "a\n{{ text"}, "prompt: Jinja says in line 2: unexpected end of template"),
        (
            {"prompt": "{% include 'x' %}{{ a }}", "system": "{% nothing %}"},
            "system: Jinja says in line 1: Encountered",
        ),
        ({"prompt": "{{ a | shout }}"}, "prompt: Jinja says in line 1: No filter named 'shout'"),
        (
            {"prompt": "{% for i in range(3) %}{{ i }}{% endfor %}"},
            "which has no field, so it is the same for all items",
        ),
        ({"template_format": "mustache"}, "template_format is 'mustache'; expected 'f-string' or 'jinja2'."),
    ],
)
def test_a_text_that_jinja_does_not_take_is_refused_at_planning(nothing, settings, sentence):
    with pytest.raises(SlurmGPUError) as raised:
        Generate(**{"model": nothing, "prompt": "{{ a }}", "template_format": "jinja2", **settings})
    assert sentence in str(raised.value)


def test_fields_are_known_at_planning_and_jinja_is_named_where_it_is_missing(nothing, monkeypatch):
    prompt = "{% for c in choices %}{{ c }}{% endfor %}{{ text }}{{ range(3) | join }}"
    workload = Generate(model=nothing, prompt=prompt, system="{{ who }}", template_format="jinja2")
    assert workload.fields == {"choices", "text", "who"}
    labelled = Classify(model=nothing, prompt="{{ text }} {{ labels }}", labels=["a", "b"], template_format="jinja2")
    assert labelled.fields == {"text"}
    assert labelled.prompts.of({"text": "x"}).text == "x a, b"
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(SlurmGPUError, match=r"needs the package Jinja2.* pip install jinja2"):
        Generate(model=nothing, prompt="{{ a }}", template_format="jinja2")


# Examples

EXAMPLES = [{"q": f"{n}", "a": f"no {n}"} for n in range(1, 7)]
SHOWN = {"prompt": "Q{q}", "target": " A{a}"}


def shots(workload, q, seed=0):
    prompt = workload.prompts.of({"q": q}, seed=seed)
    assert prompt.text == f"Q{q}"
    assert all(said == asked.replace("Q", " Ano ") for asked, said in prompt.shots)
    return [asked.removeprefix("Q") for asked, _ in prompt.shots]


def test_examples_are_all_in_their_order_or_drawn_by_the_items_seed_and_never_the_item_itself(nothing):
    every = Generate(model=nothing, fewshot=EXAMPLES, **SHOWN)
    assert shots(every, "9") == [*"123456"]
    assert shots(every, "3") == [*"12456"]
    some = Generate(model=nothing, fewshot="\n".join(map(json.dumps, EXAMPLES)) + "\n\n", num_fewshot=3, **SHOWN)
    drawn = [shots(some, "9", seed) for seed in range(200)]
    assert drawn == [shots(some, "9", seed) for seed in range(200)]
    assert {len({*each}) for each in drawn} == {3}
    counts = [sum(name in each for each in drawn) for name in "123456"]
    assert all(70 < count < 130 for count in counts)  # 100 each
    assert len({*map(tuple, drawn)}) > 60  # of 120 orders
    fewer = Generate(model=nothing, fewshot=EXAMPLES, num_fewshot=2, **SHOWN)
    assert [shots(fewer, "9", seed) for seed in range(9)] == [each[:2] for each in drawn[:9]]
    assert all("3" not in shots(some, "3", seed) for seed in range(20))


def test_an_example_may_have_any_separator_of_unicode_in_its_line(nothing):
    lines = "\r\n".join(json.dumps({"q": f"{n}\u2028\x85", "a": "b"}, ensure_ascii=False) for n in (1, 2))
    found = Generate(model=nothing, fewshot=lines, **SHOWN).prompts.of({"q": "9"}).shots
    assert [asked for asked, _ in found] == ["Q1\u2028\x85", "Q2\u2028\x85"]


def test_examples_may_be_a_list_of_json(nothing):
    found = Generate(model=nothing, fewshot=json.dumps(EXAMPLES, indent=1), **SHOWN)
    assert shots(found, "9") == [*"123456"]


def test_examples_may_be_csv(nothing):
    lines = 'q,a,more\r\n1,A1,\r\n"2, or\ntwo","A ""2""",x\r\n\r\n'
    found = Generate(model=nothing, fewshot=lines, **SHOWN).prompts.of({"q": "9"}).shots
    assert [asked for asked, _ in found] == ["Q1", "Q2, or\ntwo"]


def test_examples_are_turns_of_a_chat_or_texts_before_the_prompt(tmp_path):
    chat = "{% for m in messages %}[{{ m.role[0] }}:{{ m.content }}]{% endfor %}"
    prompt = Prompt("Q3", system="S", shots=(("Q1", " A1"), ("Q2", " A2")), between="\n")
    for template, wanted in ((None, "S\n\nQ1 A1\nQ2 A2\nQ3"), (chat, "[s:S][u:Q1][a: A1][u:Q2][a: A2][u:Q3]")):
        folder = tmp_path / str(template is None)
        folder.mkdir()
        tokenizer = make_tokenizer(folder, template)
        codec = Codec(tokenizer, EngineOptions(find_model(str(make_llama(folder, template=template)))), 2048)
        assert codec.render(prompt)[0] == wanted


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"num_fewshot": 2}, "num_fewshot needs fewshot, which is not set."),
        ({"fewshot": EXAMPLES}, "fewshot is set, and target is not. Set it to the template of an example's answer"),
        ({"fewshot": [], "target": "{a}"}, "fewshot has no examples; expected at least one."),
        ({"fewshot": EXAMPLES, "target": "{a}", "num_fewshot": 7}, "num_fewshot is 7, and fewshot has 6 examples"),
        ({"fewshot": '{"q": 1}\n{', "target": "{a}"}, "fewshot: line 2 is '{', which is not JSON"),
        ({"fewshot": "q,a\n1,2,3\n", "target": "{a}"}, "fewshot: record 1 has 3 fields, and the first line has 2"),
        ({"fewshot": 'q,a\n1,"2\n', "target": "{a}"}, "fewshot is neither JSON nor CSV (unexpected end of data)"),
        ({"fewshot": "q,a\n", "target": "{a}"}, "fewshot: line 1 is 'q,a', which is not JSON"),
        ({"fewshot": "[" * 100_000, "target": "{a}"}, "fewshot begins with [ and is not JSON"),
        ({"fewshot": '[{"q": 1}, 3]', "target": "{a}"}, "fewshot: element 2 is 3; expected the fields of an example"),
        ({"fewshot": "[]", "target": "{a}"}, "fewshot has no examples; expected at least one."),
        (
            {"fewshot": "3", "target": "{a}"},
            "fewshot: line 1 is '3'; expected the fields of an example, as in an item.",
        ),
        ({"fewshot": '{"q": 1}', "target": "{a}"}, "fewshot: example 1: no field 'a'."),
        (
            {"fewshot": EXAMPLES, "target": "{a}", "prompt": None, "messages": "m"},
            "fewshot adds examples only before prompt. Remove one",
        ),
    ],
)
def test_examples_that_cannot_be_are_refused_at_planning(nothing, settings, sentence):
    with pytest.raises(SlurmGPUError) as raised:
        Generate(**{"model": nothing, "prompt": "{q}", **settings}).place(Share(0))
    assert sentence in str(raised.value)


def test_one_calibration_for_all_items_is_not_for_drawn_examples(nothing):
    drawn = {"fewshot": EXAMPLES, "num_fewshot": 1, "target": "{a}"}
    with pytest.raises(SlurmGPUError, match="calibrate scores one prompt for all items, but num_fewshot draws"):
        Classify(model=nothing, prompt="{q}", labels=["a", "b"], calibrate=True, **drawn)


@pytest.mark.model
@pytest.mark.usefixtures("one_thread")
def test_a_model_gets_its_examples_and_its_jinja(adder):
    settings = {"model": str(adder), "precision": "fp32", "max_tokens": 32, "prompt": "{{ a }}+{{ b }}="}
    settings |= {"template_format": "jinja2", "chat": False}
    alone, after = Generate(**settings), Generate(fewshot=[{"a": 1, "b": 2, "c": 3}], target="{{ c }}", **settings)
    for workload in (alone, after):
        load_on_cpu(workload)
    item = Item(0, {"a": 47, "b": 85})
    [row], [other] = alone([item]), after([item])
    assert row["text"] == sum_steps(47, 85)
    assert other["n_prompt_tokens"] == row["n_prompt_tokens"] + len("1+2=3\n\n")


def test_a_file_of_examples_is_in_the_plan_and_planning_imports_no_torch(nothing, tmp_path):
    (tmp_path / "items.csv").write_text("q\nwhy?\n")
    (tmp_path / "shots.jsonl").write_text('{"q": 1, "a": 2}\n')
    (tmp_path / "run.toml").write_text(
        f'input = "items.csv"\nworkload.use = "generate"\n[settings]\nmodel = "{nothing}"\nprompt = "{{{{ q }}}}"\n'
        f'template_format = "jinja2"\nfewshot = "file:shots.jsonl"\ntarget = "{{{{ a }}}}"\n'
    )
    code = """
import sys
from slurmgpu.plan.planner import Path, draft_run
with draft_run(Path(sys.argv[1]), {"resources": {"gpus": 0}}) as draft:
    print(draft.plan.settings["fewshot"])
print(sorted({"torch", "transformers"} & {name.split(".")[0] for name in sys.modules}))
"""
    command = [sys.executable, "-c", code, tmp_path / "run.toml"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ['{"q": 1, "a": 2}', "[]"]


def test_values_of_numpy_are_shown_as_those_of_python():
    assert JinjaTemplate("{{ x }} {{ y }}").render({"x": np.int64(3), "y": np.array([1, 2])}) == "3 [1, 2]"


# Prompts that are too long


@pytest.mark.parametrize(
    ("side", "most", "wanted"),
    [
        ("left", 20, "Of x: 23456789 so?"),
        ("right", 20, "Of x: 01234567 so?"),
        ("left", 12, "Of x:  so?"),
        ("right", 9, "Of x: 0123456789 so?"),  # not even without the field
    ],
)
def test_the_longest_field_is_cut_and_the_template_is_whole(side, most, wanted):
    prompts = Prompts("Of {a}: {b} so?", truncation_side=side)
    prompt = prompts.of({"a": "x", "b": "0123456789"})
    found = shorten(prompt, lambda each: len(each.text) <= most - 2)
    assert found.text == wanted
    assert isinstance(found.text, Composed)
    assert all(found.text[start:stop] in ("x", wanted[6:-4]) for start, stop in found.text.quoted)


def test_of_a_chat_the_users_last_message_is_cut():
    chat = [
        {"role": "user", "content": "a" * 9},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "12345"},
    ]
    prompts = Prompts(messages="m", truncation_side="left")
    found = shorten(prompts.of({"m": chat}), lambda each: sum(len(one["content"]) for one in each.messages) <= 13)
    assert [one["content"] for one in found.messages] == ["a" * 9, "b", "345"]
    with pytest.raises(SlurmGPUError, match="truncation_side is 'top'; expected 'left' or 'right'"):
        Prompts("{a}", truncation_side="top")


def test_field_ranges_stay_those_of_the_item_after_a_cut(tmp_path):
    tokenizer = make_tokenizer(tmp_path)
    codec = Codec(tokenizer, EngineOptions(find_model(str(make_llama(tmp_path)))), 2048)
    text = Template("</s>{a}</s>{b}").render({"a": "x" * 50, "b": "</s>"})
    found = shorten(Prompt(text, truncation_side="right"), lambda each: len(each.text) <= 20)
    assert found.text == "</s>" + "x" * 8 + "</s></s>"
    assert encoded(codec, found).count(tokenizer.eos_token_id) == 2


@pytest.mark.parametrize("ends", [False, True])
def test_an_end_in_a_template_is_kept_and_one_of_the_tokenizer_is_not(tmp_path, ends):
    tokenizer = make_tokenizer(tmp_path, template=None)
    if ends:
        made = tokenizer.backend_tokenizer
        special = [(each, tokenizer.convert_tokens_to_ids(each)) for each in ("<s>", "</s>")]
        made.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=special)
    assert (tokenizer("a")["input_ids"][-1] == tokenizer.eos_token_id) is ends
    codec = Codec(tokenizer, EngineOptions(find_model(str(make_llama(tmp_path)))), 2048)
    for text in ("x", "x</s>", "x</s></s>", "</s>", ""):
        found = encoded(codec, Prompt(Composed(text)))
        assert tokenizer.convert_ids_to_tokens(found) == ["<s>", *re.findall("x|</s>", text)]
    # Also where the probability of a text behind the prompt is asked.
    whole, n_before = tokens_of(Passage(0, Prompt("a", answer=Composed("x</s>"))), codec, 2048)
    assert tokenizer.convert_ids_to_tokens(whole[n_before:]) == ["x", "</s>"]


@pytest.mark.model
@pytest.mark.usefixtures("one_thread")
def test_a_prompt_that_was_cut_is_counted_in_its_row_and_in_the_summary(nothing, adder, project, slurmgpu):
    settings = {"model": str(adder), "precision": "fp32", "max_context": 40, "prompt": "{a}+{b}="}
    items = [Item(0, {"a": "12", "b": "34"}), Item(1, {"a": "1" * 30 + "12", "b": "34"})]
    wanted = sum_steps(12, 34)
    cut = Generate(truncation_side="left", max_tokens=32, **settings)
    whole = Generate(max_tokens=32, **settings)
    for workload in (cut, whole):
        load_on_cpu(workload)
    first, second = cut(items)
    assert (first["n_truncated"], second["n_truncated"]) == (0, 29)
    assert second["n_prompt_tokens"] == 8
    assert first["text"] == wanted
    assert isinstance(whole(items)[1], ItemError)

    labels = {"labels": ["hate", "ok"], "prompt": ":{a}", "truncation_side": "right"}
    for method in ("score", "parse"):
        classify = load_on_cpu(
            Classify(**{**settings, **labels, "method": method, **({"max_tokens": 9} if method == "parse" else {})})
        )
        [short, long] = classify([Item(0, {"a": "they are scum"}), Item(1, {"a": "they are scum" + " and so on" * 9})])
        assert (short["label"], short["n_truncated"]) == ("hate", 0)
        assert long["n_truncated"] > 50

    lines = [{"text": "1" * n} for n in (3, 50, 60, 4)]
    folder = project(items=lines, settings={**settings, "prompt": "{text}", "max_tokens": 4, "truncation_side": "left"})
    text = (folder / "slurmgpu.toml").read_text()
    (folder / "slurmgpu.toml").write_text(text.replace("workloads.py:Rows", "generate"))
    shown = slurmgpu("submit", "--executor", "debug", "--gpus", "0", cwd=folder, expect=0, OMP_NUM_THREADS="1").stdout
    assert "truncated          2" in shown
