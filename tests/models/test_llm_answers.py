"""Prompts through chat templates, and answers read into text and reasoning."""

import itertools
from dataclasses import replace
from datetime import datetime

import pytest

from slurmgpu.llm.heads.head import HeadInput
from slurmgpu.llm.heads.inputs import HeadCodec
from slurmgpu.llm.interface.engine import EngineOptions, Prompt, Request, Sampling
from slurmgpu.llm.prompts.codec import ANOTHER, OTHER, Codec
from slurmgpu.llm.prompts.encoded import Encoded, Finished, PromptError
from slurmgpu.llm.prompts.templates import Template
from slurmgpu.llm.vllm_engine.engine import VllmEngine
from tests.support.tiny_models import TEMPLATE, make_tokenizer


def codec(folder, *, added=(), special=(), template=TEMPLATE, **options):
    tokenizer = make_tokenizer(folder, template)
    tokenizer.add_tokens([*added])
    tokenizer.add_tokens([*special], special_tokens=True)
    return Codec(tokenizer, EngineOptions(None, **options), 2048), tokenizer


def split(made, tokenizer, answer, prompt="<s>1"):
    ids = [tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (prompt, answer)]
    output = made.decoder.decode(Finished(Encoded(Request(0, Prompt(), Sampling()), ids[0]), ids[1], "stop"))
    return output.text, output.reasoning


HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>")
HARMONY_TEMPLATE = "<|start|>user<|message|>{{ messages[0]['content'] }}<|end|><|start|>assistant"
THOUGHTFUL = "{{ messages[0]['content'] }}{{ '<think>\n' }}"

NO_SYSTEM = "{% for m in messages %}{{ m.content if m.role == 'user' else raise_exception('no') }}{% endfor %}"


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
        (
            "{{ messages[1].content + messages[0].content }}",
            Prompt(messages=({"content": "1"}, {"content": "2"})),
            {},
            "21",
        ),
        (NO_SYSTEM.replace("raise_exception('no')", "''"), Prompt("1+1=", system="be"), {}, "be\n\n1+1="),
        (HARMONY_TEMPLATE, Prompt("1"), {}, "<|start|>user<|message|>1<|end|><|start|>assistant"),
        (
            HARMONY_TEMPLATE,
            Prompt("1", answer="so "),
            {},
            "<|start|>user<|message|>1<|end|><|start|>assistant<|channel|>final<|message|>so ",
        ),
        (None, Prompt("1+1=", system="be", answer="2"), {}, "<s>be\n\n1+1=2"),
        (TEMPLATE, Prompt("1+1=", system="be"), {"chat": False}, "<s>be\n\n1+1="),
        (TEMPLATE, Prompt("1+1=", system="be"), {}, "<s>be1+1="),
        (NO_SYSTEM, Prompt("1+1=", system="be"), {}, "be\n\n1+1="),
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


SPACED = (
    "{% for m in messages %}{{ '1' + m.content if m.role == 'user' else ' ' + m.content | trim + '=' }}{% endfor %}"
)
EMPTIED = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}"
    "{{ '#' + ('<think>\n\n</think>\n\n' if loop.last) + m.content }}=\n{% endif %}{% endfor %}"
    "{{ '#' if add_generation_prompt }}"
)


@pytest.mark.parametrize(
    ("template", "turns", "expected"),
    [
        (SPACED, ["2", "so "], "12 so"),  # as Llama 2
        (SPACED, ["2", "so", "3", "we"], "12 so=13 we"),
        (EMPTIED, ["2", "so "], "2#<think>\n\n</think>\n\nso "),  # as Qwen 3
        (EMPTIED, ["2", "</s>"], "2#<think>\n\n</think>\n\n\0</s>"),  # which is text in a turn
        (NO_SYSTEM.replace("raise_exception('no')", "m.content if m.role == 'assistant' else 0/0"), ["1", "2"], "12"),
    ],
)
def test_a_turn_of_the_assistant_that_goes_on_is_as_the_template_writes_it(tmp_path, template, turns, expected):
    made, tokenizer = codec(tmp_path, added=("<think>", "</think>"), template=template)
    roles = itertools.cycle(["user", "assistant"])
    messages = tuple({"role": role, "content": text} for role, text in zip(roles, turns, strict=False))
    encoded = made.encode(Request(0, Prompt(messages=messages, continues=True), Sampling()))
    text, is_text, special = expected.partition("\0")
    wanted = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not is_text:
        assert tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True) == text
    assert list(encoded.tokens[: len(wanted)]) == wanted
    assert (len(encoded.tokens) > len(wanted)) == bool(special)
    assert tokenizer.eos_token_id not in encoded.tokens
    assert made.decoder.reasoning_of(encoded) is None


HEADED = (
    "{% for m in messages %}{{ m.role + '\n' + m.content.split('</think>') | last | trim + '=' }}{% endfor %}"
    "{{ 'assistant\n' if add_generation_prompt }}"
)


@pytest.mark.parametrize("blank", ["", " \n"])
def test_of_a_turn_of_the_assistant_without_text_the_model_writes_all(tmp_path, blank):
    made, _ = codec(tmp_path, added=("<think>", "</think>"), template=HEADED)
    messages = ({"role": "user", "content": "2"}, {"role": "assistant", "content": blank})
    found = made.render(Prompt(messages=messages, continues=True))
    assert found == made.render(Prompt(messages=messages[:1]), answers_at_once=True)
    assert found[0].startswith("user\n2=assistant\n")


def test_a_turn_of_the_assistant_that_its_template_shortens_is_refused(tmp_path):
    made, _ = codec(tmp_path, template=HEADED)
    messages = ({"role": "user", "content": "2"}, {"role": "assistant", "content": "<think>hm</think>so"})
    with pytest.raises(PromptError, match="the chat template rejects the messages: continue_final_message is set"):
        made.render(Prompt(messages=messages, continues=True))


def test_an_answer_behind_an_earlier_turn_of_the_assistant_is_in_the_prompt(tmp_path):
    made, _ = codec(tmp_path, template=SPACED)
    messages = ({"role": "user", "content": "2"}, {"role": "assistant", "content": "so"})
    assert made.render(Prompt(messages=messages, answer="15")) == ("12 so=15", True)


def test_half_of_a_surrogate_pair_fails_its_own_prompt(tmp_path):
    made, _ = codec(tmp_path)
    with pytest.raises(PromptError, match=r"half of a surrogate pair, .ud83d"):
        made.encode(Request(0, Prompt("1\ud83d"), Sampling()))


FEW_ROLES = (
    "{% for m in messages %}{{ m.content if m.role in ('user', 'system') else m.content | tojson "
    "if m.role == 'tool' else m.content.split('</think>') | last if m.role == 'assistant' }}{% endfor %}"
)


def test_a_turn_that_the_template_leaves_out_is_an_error_of_its_item(tmp_path):
    made, _ = codec(tmp_path, template=FEW_ROLES)
    turns = [("user", "1"), ("assistant", "<think>so</think>"), ("tool", 'a "b"'), ("user", "2")]
    chat = tuple({"role": role, "content": text} for role, text in turns)
    assert made.render(Prompt(messages=chat))[0] == '1"a \\"b\\""2'  # reasoning may be left out, and text encoded
    with pytest.raises(PromptError, match="a turn of the role 'developer', 'be brief'"):
        made.render(Prompt(messages=({"role": "developer", "content": "be brief"}, *chat)))
    late = made.render(Prompt(messages=(*chat, {"role": "system", "content": "be"})))
    assert late[0].endswith("2be")
    assert made.render(Prompt(messages=(*chat[:3], {"role": "user", "content": OTHER})))[0].endswith(OTHER)


@pytest.mark.parametrize("result", ["5", OTHER, ANOTHER])
def test_a_short_turn_that_is_left_out_is_not_taken_for_another_with_its_text(tmp_path, result):
    made, _ = codec(
        tmp_path, template="{% for m in messages if m.role in ('user', 'assistant') %}{{ m.content }}{% endfor %}"
    )
    turns = [("user", f"5 or {result}?"), ("assistant", "2+3"), ("tool", result), ("user", "go on")]
    with pytest.raises(PromptError, match="leaves out a turn of the role 'tool'"):
        made.render(Prompt(messages=tuple({"role": role, "content": text} for role, text in turns)))


def test_a_template_without_system_messages_is_told_of_once(tmp_path, caplog):
    made, _ = codec(tmp_path, template=NO_SYSTEM)
    with caplog.at_level("INFO"):
        for _ in range(2):
            assert made.render(Prompt("1", system="be")) == ("be\n\n1", True)
    assert [record.getMessage() for record in caplog.records if "takes no system message" in record.getMessage()] == [
        "the chat template takes no system message (no); putting it before the user's first message"
    ]
    with pytest.raises(PromptError, match="rejects the messages: no"):
        made.render(Prompt(messages=({"role": "assistant", "content": "1"},)))


ASK = Template("ask <s>{text}<s>!")


@pytest.mark.parametrize("template", [TEMPLATE, None])
@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (Prompt("1<s>2</s>"), "# 1 ? s ? 2 ? ? s ?"),
        (Prompt("1", system="<s>"), "# ? s ? \n \n 1"),
        (Prompt("1", answer="</s>"), "# 1 ? ? s ?"),
        (Prompt(ASK.render({"text": "1"})), "# a s k _ # 1 # ?"),  # what the template says of its own is meant
        (Prompt(ASK.render({"text": "</s><s>"})), "# a s k _ # ? ? s ? ? s ? # ?"),
        (Prompt(Template("<{text}>").render({"text": "s"})), "# ? s ?"),
        (Prompt(messages=({"role": "user", "content": "<pad></s>"},)), "# ? p a d ? ? ? s ?"),
    ],
    ids=str,
)
def test_what_looks_like_a_special_token_in_an_item_is_text(tmp_path, template, prompt, expected):
    """There is a token for each character: # stands for a special one, ? for one that this tokenizer does not know."""
    template = TEMPLATE if prompt.messages else template
    made, tokenizer = codec(tmp_path, template=template)
    tokens = made.encode(Request(0, prompt, Sampling())).tokens
    expected = expected if template is None else expected.replace(" \n \n", "")
    unknown = tokenizer.unk_token_id
    found = ["#" if token < unknown else "?" if token == unknown else tokenizer.decode([token]) for token in tokens]
    assert found == [each.replace("_", " ") for each in expected.split(" ")]


def test_scores_are_of_the_answer_and_not_of_reasoning(tmp_path):
    for template, ending in [(HARMONY_TEMPLATE, "<|channel|>final<|message|>"), (THOUGHTFUL, "</think>\n\n")]:
        made, _ = codec(tmp_path, added=(*HARMONY, "<think>", "</think>"), template=template)
        assert made.render(Prompt("1"), answers_at_once=True)[0].endswith(ending)
        assert not made.render(Prompt("1"))[0].endswith(ending)


def test_an_answer_that_is_to_fit_has_what_the_context_leaves(tmp_path):
    made, _ = codec(tmp_path)
    n_before = len(made.encode(Request(0, Prompt(), Sampling())).tokens)
    found = {}
    for room in (600, 512, 3, 0):
        request = Request(room, Prompt("1" * (2048 - n_before - room)), Sampling(fit=True))
        try:
            found[room] = made.encode(request).request.sampling.max_tokens
        except PromptError as error:
            found[room] = error.output(request).finish_reason
    assert found == {600: 512, 512: 512, 3: 3, 0: "length"}


def test_vllm_is_told_which_special_tokens_are_stop_texts(tmp_path):
    made, tokenizer = codec(tmp_path, special=HARMONY)
    engine = object.__new__(VllmEngine)
    engine._codec, engine._stop_ids = made, [2]
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    for stop, expected in (((), [2]), (("a", "end"), [2]), (("a", "<|end|>"), [2, end])):
        encoded = made.encode(Request(0, Prompt("1"), Sampling(stop=stop)))
        assert engine._sampling_arguments(encoded)["stop_token_ids"] == expected


# Answers that a model goes on with


def going_on(made, tokenizer, said, so_far, prompt="1"):
    """The text of a prompt's tokens, behind what was asked, where an answer goes on that was generated before."""
    asked = Request(0, Prompt(prompt), Sampling())
    encoded = made.encode(asked)
    tokens = tuple(said) if not isinstance(said, str) else tuple(tokenizer(said, add_special_tokens=False)["input_ids"])
    output = made.decoder.decode(Finished(encoded, tokens, "stop"))
    more = replace(asked.prompt, so_far=so_far, generated=output.generated)
    found = made.encode(replace(asked, prompt=more))
    assert found.tokens[: len(encoded.tokens)] == encoded.tokens
    return tokenizer.decode(found.tokens[len(encoded.tokens) :]), found


ANALYSIS = "<|channel|>analysis<|message|>sum<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("template", "said", "so_far", "expected"),
    [
        (HARMONY_TEMPLATE, f"{ANALYSIS}<|channel|>final<|message|>4\n6<|return|>", "4\n", "4\n"),
        (HARMONY_TEMPLATE, "<|channel|>final<|message|>4\n6<|return|>", "4\n", "<|channel|>final<|message|>4\n"),
        (TEMPLATE, "<think>\nsum\n</think>\n\n4\n6", "4\n", "<think>\nsum\n</think>\n\n4\n"),
        (TEMPLATE, "4\n6", "4\n", "4\n"),
        (THOUGHTFUL, "sum\n</think>4\n\n6\n7</s>", "4\n\n6\n", "sum\n</think>4\n\n6\n"),
        (THOUGHTFUL, "</think>\n\n4\n6</s>", "4\n", "</think>\n\n4\n"),
    ],
)
def test_an_answer_goes_on_behind_the_reasoning_that_led_to_it(tmp_path, template, said, so_far, expected):
    marks = {"special": HARMONY} if template == HARMONY_TEMPLATE else {"added": ("<think>", "</think>")}
    made, tokenizer = codec(tmp_path, template=template, **marks)
    expected = ANALYSIS + "<|channel|>final<|message|>" + expected if said.startswith(ANALYSIS) else expected
    found, encoded = going_on(made, tokenizer, said, so_far)
    assert found == expected
    # What it then generates is all answer, and its beginnings can be gone on with as well.
    more = made.decoder.decode(
        Finished(encoded, tuple(tokenizer("8\n9", add_special_tokens=False)["input_ids"]), "stop")
    )
    assert (more.text, more.reasoning) == ("8\n9", "")
    longer = replace(encoded.request.prompt, so_far=so_far + "8\n", generated=more.generated)
    last = made.encode(replace(encoded.request, prompt=longer)).tokens
    assert tokenizer.decode(last) == tokenizer.decode(encoded.tokens) + "8\n"


def test_an_answer_goes_on_from_the_tokens_that_were_generated_if_one_ends_there(tmp_path):
    made, tokenizer = codec(tmp_path, added=("12", "\n4"))
    one, two, new, four = tokenizer.convert_tokens_to_ids(["1", "2", "\n", "4"])
    twelve, line = tokenizer.convert_tokens_to_ids(["12", "\n4"])
    for said, expected in [
        ((one, two, new, four), (one, two, new)),  # the tokenizer would say "12"
        ((twelve, new, four), (twelve, new)),
        ((one, two, line), (twelve, new)),  # its own, where a token goes on
    ]:
        _, encoded = going_on(made, tokenizer, said, "12\n")
        assert encoded.tokens[-len(expected) :] == expected


def test_an_answer_with_tokens_that_its_text_lacks_goes_on_with_them_or_is_refused(tmp_path):
    """As of a template that marks reasoning by special tokens of other names."""
    made, tokenizer = codec(tmp_path, added=("\n4",), special=("[THINK]", "[/THINK]"))
    found, encoded = going_on(made, tokenizer, "[THINK]3\n3[/THINK]\n6\n7</s>", "3\n3\n6\n")
    assert found == "[THINK]3\n3[/THINK]\n6\n"
    assert encoded.request.prompt.generated.hidden  # no other path shares its steps
    with pytest.raises(
        PromptError, match=r"continued after '3\\n': the model generated '\[THINK\]' there, which the answer's"
    ):
        going_on(made, tokenizer, "[THINK]3\n4[/THINK]\n6", "3\n")


def test_an_answer_of_two_messages_is_not_gone_on_with(tmp_path):
    made, tokenizer = codec(tmp_path, special=HARMONY, template=HARMONY_TEMPLATE)
    said = f"{ANALYSIS}<|channel|>final<|message|>4\n<|end|><|start|>assistant<|channel|>final<|message|>6\n7"
    with pytest.raises(PromptError, match="the answer's text does not show"):
        going_on(made, tokenizer, said, "4\n6\n")


DATED = (
    "\n  {% if strftime_now is defined %}{% set day = strftime_now('%d %b %Y') %}{% endif %}"
    "{% macro said() %}{{ strftime_now('%A, %B %-d') + '#' + strftime_now('%Y-%m-%d') }}{% endmacro %}"
    "{{ day }}\n{{ said() }}{{ messages[0]['content'] }}\n"
)
"""A date as Llama 3.2 writes it, then two from a macro, as in gpt-oss."""


@pytest.mark.parametrize("where", ["tokenizer", "chat_options"])
def test_a_template_that_writes_the_date_writes_that_of_the_run(tmp_path, where):
    given = {"chat_options": {"chat_template": DATED}} if where == "chat_options" else {}
    template = DATED if where == "tokenizer" else TEMPLATE
    days = [datetime.now()]
    by_clock, of_run = (
        codec(tmp_path, template=template, date=date, **given)[0].render(Prompt("1"))[0]
        for date in (None, "2024-07-06")
    )
    days.append(datetime.now())  # midnight may be between
    assert of_run == "\n06 Jul 2024\nSaturday, July 6#2024-07-061"
    assert by_clock in [day.strftime("\n%d %b %Y\n%A, %B %-d#%Y-%m-%d1") for day in days]


def blank_putting(way):
    """A tokenizer of characters that puts a blank before a text: as Llama 2's, as newer ones, and as XLM-R's."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    characters = ["<s>", "</s>", "<unk>", "▁", *"abcdeghilmnorstuvw<>/=\n"]
    made = Tokenizer(models.BPE({text: number for number, text in enumerate(characters)}, [], unk_token="<unk>"))
    if way == "normalizer":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=way)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **names, chat_template=template)


@pytest.mark.parametrize("way", ["normalizer", "first", "always", "never"])
def test_a_text_like_a_special_token_gets_no_blank_in_it(way):
    tokenizer = blank_putting(way)
    made = Codec(tokenizer, EngineOptions(None, chat=False), 2048)
    text = Template("see {text}").render({"text": "a</s>b </s>\nend"})
    whole = tokenizer(text, split_special_tokens=True)["input_ids"]
    assert list(made.encode(Request(0, Prompt(text), Sampling(max_tokens=4))).tokens) == whole
    before, own = made.begin(text)
    assert [*before, *own] == whole
    # The steps of a chat, which are cut at their ends.
    steps = HeadCodec(tokenizer, EngineOptions(None), 2048, cut=False, step_end="\n", marks=(), n_known=99)
    found = steps.encode(HeadInput(0, Prompt("so"), chat=True, steps=("see", "a </s>")))
    assert tokenizer.convert_ids_to_tokens(found.tokens[-13:]) == [*"sosee\na▁</s>\n"]
    assert found.ends[-1] == len(found.tokens) - 1


@pytest.mark.parametrize("text", ["{text}", "<s>{text}", "<s> {text}"])
def test_a_text_that_begins_with_the_tokenizers_own_tokens_gets_them_once(tmp_path, text):
    made, tokenizer = codec(tmp_path, template=None)
    asked = Template(text).render({"text": "1+1="})
    [start, *rest] = tokenizer(text.removeprefix("<s>").format(text="1+1="))["input_ids"]
    assert start == tokenizer.bos_token_id
    assert made.encode(Request(0, Prompt(asked), Sampling())).tokens == (start, *rest)
    assert made.begin(asked) == ((start,), tuple(rest))
    heads = HeadCodec(tokenizer, EngineOptions(None), 2048, cut=False, step_end="\n", marks=(), n_known=99)
    assert heads.encode(HeadInput(0, Prompt(asked))).tokens == (start, *rest)


def test_an_items_text_that_begins_like_the_tokenizers_own_tokens_is_text(tmp_path):
    made, tokenizer = codec(tmp_path, template=None)
    asked = Template("{text}").render({"text": "<s>1"})
    assert made.encode(Request(0, Prompt(asked), Sampling())).tokens[0] == tokenizer.bos_token_id
    assert tokenizer.bos_token_id not in made.encode(Request(0, Prompt(asked), Sampling())).tokens[1:]
