import pytest

from slurmgpu.llm.answers import Codec, Encoded, Finished
from slurmgpu.llm.engine import EngineOptions, Prompt, Request, Sampling
from tests.tiny_models import TEMPLATE, make_tokenizer


def codec(folder, *, added=(), template=TEMPLATE, **options):
    tokenizer = make_tokenizer(folder, template)
    tokenizer.add_tokens([*added])
    return Codec(tokenizer, EngineOptions(None, **options), 2048), tokenizer


def split(made, tokenizer, answer, prompt="<s>1"):
    ids = [tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (prompt, answer)]
    output = made.decode(Finished(Encoded(Request(0, Prompt(), Sampling()), ids[0]), ids[1], "stop"))
    return output.text, output.reasoning


HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>")
HARMONY_TEMPLATE = "<|start|>user<|message|>{{ messages[0]['content'] }}<|end|><|start|>assistant"
THOUGHTFUL = "{{ messages[0]['content'] }}{{ '<think>\n' }}"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (
            "<|channel|>analysis<|message|>sum<|end|><|start|>assistant<|channel|>final<|message|>46<|return|>",
            ("46", "sum"),
        ),
        ("<|channel|>analysis<|message|>su", ("", "su")),
        ("<|channel|>final<|message|>46", ("46", "")),
        ("46<|return|>", ("46", "")),
        ("<|channel|>commentary to=a<|message|>1<|call|>", ("", "1")),
    ],
)
def test_harmony_channels_become_text_and_reasoning(tmp_path, answer, expected):
    assert split(*codec(tmp_path, added=HARMONY), answer) == expected


@pytest.mark.parametrize(
    ("prompt", "answer", "expected"),
    [
        ("1", "<think>\nsum\n</think>\n\n46", ("46", "sum")),
        ("1<think>\n", "sum\n</think>\n\n46", ("46", "sum")),
        ("1<think>\n", "sum and", ("", "sum and")),
        ("1<think>\n\n</think>\n\n", "46", ("46", "")),
        ("1", "46", ("46", "")),
    ],
)
def test_thoughts_become_reasoning(tmp_path, prompt, answer, expected):
    assert split(*codec(tmp_path, added=("<think>", "</think>")), answer, prompt) == expected


@pytest.mark.parametrize(
    ("template", "prompt", "options", "expected"),
    [
        (None, Prompt("1+1=", answer="2"), {}, "<s>1+1=2"),
        (TEMPLATE, Prompt("1+1="), {}, "<s>1+1="),
        (TEMPLATE, Prompt("1+1=", answer="2"), {"chat": False}, "<s>1+1=2"),
        ("{{ messages[0]['content'] }}{{ note }}", Prompt("1"), {"chat_options": {"note": "yes"}}, "1yes"),
        ("{{ messages[1]['content'] }}", Prompt(messages=({"content": "1"}, {"content": "2"})), {}, "2"),
        (HARMONY_TEMPLATE, Prompt("1"), {}, "<|start|>user<|message|>1<|end|><|start|>assistant"),
        (
            HARMONY_TEMPLATE,
            Prompt("1", answer="so "),
            {},
            "<|start|>user<|message|>1<|end|><|start|>assistant<|channel|>final<|message|>so ",
        ),
        (THOUGHTFUL, Prompt("1"), {}, "1<think>\n"),
        (THOUGHTFUL, Prompt("1", answer="so"), {}, "1<think>\n\n</think>\n\nso"),
    ],
)
def test_a_prompt_is_put_into_its_template_and_the_answer_begins_as_asked(
    tmp_path, template, prompt, options, expected
):
    made, tokenizer = codec(tmp_path, added=(*HARMONY, "<think>", "</think>"), template=template, **options)
    tokens = made.encode(Request(0, prompt, Sampling())).tokens
    assert list(tokens) == tokenizer(expected, add_special_tokens=False)["input_ids"]


def test_scores_are_of_the_answer_and_not_of_reasoning(tmp_path):
    for template, ending in [(HARMONY_TEMPLATE, "<|channel|>final<|message|>"), (THOUGHTFUL, "</think>\n\n")]:
        made, _ = codec(tmp_path, added=(*HARMONY, "<think>", "</think>"), template=template)
        assert made.render(Prompt("1"), answers_at_once=True)[0].endswith(ending)
        assert not made.render(Prompt("1"))[0].endswith(ending)
