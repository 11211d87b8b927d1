"""Prompts of score and collect: Jinja, examples, images, and texts that are too long."""

import inspect
import io
from dataclasses import replace

import numpy as np
import pytest

from slurmgpu.errors import SlurmGPUError
from slurmgpu.llm.heads.head import HEADS_WITH_IMAGES
from slurmgpu.llm.interface.engine import EngineOptions, Generated, Request, Sampling
from slurmgpu.llm.models.source import find_model
from slurmgpu.llm.prompts.codec import Codec
from slurmgpu.llm.prompts.templates import Prompts
from slurmgpu.shards.columns import convert_row
from slurmgpu.workload import Item, Share, TaskContext
from slurmgpu.workloads.collect.workload import Collect
from slurmgpu.workloads.judge.workload import Judge
from slurmgpu.workloads.language_model import IMAGE_ITEMS
from slurmgpu.workloads.score.workload import Score
from tests.support.engines import Says, load_on_cpu
from tests.support.tiny_heads import CHAT, make_head
from tests.support.tiny_models import make_llama, make_tokenizer
from tests.support.tiny_vision_models import make_gemma3_head, make_llava, make_png

pytestmark = pytest.mark.usefixtures("one_thread")

EXAMPLES = [{"q": "1+1", "a": "2"}, {"q": "2+2", "a": "4"}]
IN_JINJA = {"template_format": "jinja2", "fewshot": EXAMPLES, "target": "{{ a }}"}


@pytest.fixture(scope="module")
def process_model(tmp_path_factory):
    return str(make_head(tmp_path_factory.mktemp("process"), task="TokenClassification", template=CHAT))


def rows_of(model, data, **settings):
    workload = load_on_cpu(Score(model=model, precision="fp32", **settings))
    rows = workload([Item(number, each, 7) for number, each in enumerate(data)])
    for row in rows:
        convert_row(workload.columns, row)
    return rows


# A head.


def test_examples_are_turns_before_the_chat_that_a_reward_model_scores(reward_model):
    [row] = rows_of(reward_model, [{"q": "3+4", "t": "7"}], prompt="{{ q }}=", answer="{{ t }}", **IN_JINJA)
    turns = [("1+1=", "2"), ("2+2=", "4"), ("3+4=", "7")]
    chat = [{"role": r, "content": c} for turn in turns for r, c in zip(("user", "assistant"), turn, strict=True)]
    whole, short = (rows_of(reward_model, [{"m": each}], messages="m")[0] for each in (chat, chat[-2:]))
    assert row["score"] == pytest.approx(whole["score"], abs=1e-5)
    assert abs(row["score"] - short["score"]) > 1e-3
    # An item is no example of itself.
    [row] = rows_of(reward_model, [{"q": "1+1", "t": "2"}], prompt="{{ q }}=", answer="{{ t }}", **IN_JINJA)
    own = [*chat[2:4], *chat[:2]]
    assert row["score"] == pytest.approx(rows_of(reward_model, [{"m": own}], messages="m")[0]["score"], abs=1e-5)


def test_examples_stand_before_a_plain_text_and_before_steps_without_a_chat(reward_model, process_model):
    more = {**IN_JINJA, "fewshot_delimiter": "#", "system": "add"}
    by_hand = "add\n\n1+1=2#2+2=4#3+4="
    [row] = rows_of(reward_model, [{"q": "3+4"}], prompt="{{ q }}=", **more)
    [wanted] = rows_of(reward_model, [{"t": by_hand}], prompt="{t}")
    assert row == pytest.approx(wanted, abs=1e-5)
    steps = {"steps": "s", "chat": False}
    [row] = rows_of(process_model, [{"q": "3+4", "s": ["a", "b"]}], prompt="{{ q }}=", **steps, **more)
    [wanted] = rows_of(process_model, [{"t": by_hand, "s": ["a", "b"]}], prompt="{t}", **steps)
    np.testing.assert_allclose(row["step_scores"], wanted["step_scores"], atol=1e-5)
    assert row["n_tokens"] == wanted["n_tokens"]


def test_a_prompt_that_is_too_long_is_cut_at_its_side_and_the_answer_is_whole(reward_model, process_model):
    long = "".join(map(str, range(100)))
    [row] = rows_of(reward_model, [{"q": long, "t": "7"}], prompt="{q}=", answer="{t}", truncation_side="left")
    assert (row["n_tokens"], row["n_truncated"]) == (128, len(long) - 119)
    [wanted] = rows_of(reward_model, [{"q": long[-119:], "t": "7"}], prompt="{q}=", answer="{t}")
    assert row["score"] == pytest.approx(wanted["score"], abs=1e-5)
    [row, whole] = rows_of(
        process_model,
        [{"q": long, "s": ["a", "b"]}, {"q": "3", "s": ["a"]}],
        prompt="{q}",
        steps="s",
        truncation_side="right",
    )
    assert len(row["step_scores"]) == 2
    assert row["n_truncated"] > 0
    assert whole["n_truncated"] == 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"pair": ["{q}", "{t}"], "fewshot": EXAMPLES, "target": "{a}"}, "fewshot and pair are both set"),
        (
            {"pair": ["{q}", "{t}"], "truncation_side": "left"},
            "only the second text of a pair can be cut. Set cut = true",
        ),
        ({"prompt": "{q}", "cut": True, "truncation_side": "left"}, "two ways to shorten a text"),
        ({"prompt": "{q}", "template_format": "jinja2"}, "which has no field"),
        ({"prompt": "{q}", "images": "photo"}, "only a chat template has a place for images. Set chat = true"),
        ({"pair": ["{q}", "{t}"], "images": "photo"}, "images and pair are both set"),
        ({"prompt": "{q}", "steps": "s", "images": "photo"}, "images and steps are both set"),
    ],
)
def test_prompts_that_a_head_cannot_have_are_refused(reward_model, settings, said):
    with pytest.raises(SlurmGPUError, match=said):
        Score(model=reward_model, **settings)


# Images before what a head scores.


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    return str(make_gemma3_head(tmp_path_factory.mktemp("gemma")))


def test_a_reward_model_scores_an_answer_about_an_image_as_transformers_does(gemma, tmp_path):
    import torch
    from PIL import Image
    from transformers import AutoModelForSequenceClassification, AutoProcessor

    processor = AutoProcessor.from_pretrained(gemma)
    model = AutoModelForSequenceClassification.from_pretrained(gemma, dtype=torch.float32).eval()
    (tmp_path / "a.png").write_bytes(make_png(1))
    items = [
        {"photo": "a.png", "q": "cat?", "t": "yes"},
        {"photo": make_png(2), "q": "cat?", "t": "yes"},
        {"photo": "b.png", "q": "cat?", "t": "yes"},
        {"photo": [make_png(1), make_png(3)], "q": "cat?", "t": "<start_of_image>"},
    ]
    settings = {"prompt": "{q}", "answer": "{t}", "images": "photo", "image_folder": str(tmp_path)}
    first, second, missing, several = rows_of(gemma, items[:2], **settings) + _rows(gemma, items[2:], **settings)
    assert "b.png cannot be read: No such file" in str(missing)
    alone = []
    for number in (1, 2):
        text = "<|user|><start_of_image>cat?<|end|><|assistant|>yes<|end|>"
        image = Image.open(io.BytesIO(make_png(number))).convert("RGB")
        inputs = processor(text=[text], images=[image], add_special_tokens=False, return_tensors="pt")
        with torch.inference_mode():
            alone.append(float(model(**inputs).logits))
    assert [first["score"], second["score"]] == pytest.approx(alone, abs=1e-4)
    assert abs(alone[0] - alone[1]) > 1e-3
    # Two images, and a text of the item that looks like one.
    assert several["n_tokens"] > first["n_tokens"] + 6 + len("<start_of_image>") - len("yes")


def _rows(model, data, **settings):
    workload = load_on_cpu(Score(model=model, precision="fp32", **settings))
    return workload([Item(number, each, 7) for number, each in enumerate(data)])


def test_a_scorer_judges_answers_about_images(gemma):
    judge = Judge(scorer={"model": gemma, "images": "photo", "precision": "fp32"})
    assert judge.fields == {"photo", "question", "text"}
    assert judge.batch_size == IMAGE_ITEMS
    load_on_cpu(judge)
    [row] = judge([Item(0, {"photo": make_png(1), "question": "cat?", "text": "yes"})])
    [wanted] = rows_of(gemma, [{"p": make_png(1), "q": "cat?", "t": "yes"}], prompt="{q}", answer="{t}", images="p")
    assert row["score"] == pytest.approx(wanted["score"], abs=1e-5)


def test_heads_that_take_images_are_those_of_transformers_and_others_are_refused(gemma, reward_model):
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as HEADS

    decoders = {kind: getattr(transformers, name) for kind, name in HEADS.items() if kind in HEADS_WITH_IMAGES}
    assert all("pixel_values" in inspect.signature(each.forward).parameters for each in decoders.values())
    assert decoders.keys() == HEADS_WITH_IMAGES
    settings = {"prompt": "{q}", "answer": "{t}", "images": "p"}
    Score(model=gemma, **settings).place(Share(1, gpu_memory=10**10))
    with pytest.raises(
        SlurmGPUError, match="has the type llama, whose heads take no images; expected a model of type gemma3 or"
    ):
        Score(model=reward_model, **settings).place(Share(0))


# Paths.


def test_paths_of_a_question_have_its_examples_also_where_they_are_continued(tmp_path):
    model = str(make_llama(tmp_path))
    workload = Collect(model=model, prompt="{{ q }}=", reference="a", paths=2, rollouts=1, num_fewshot=1, **IN_JINJA)
    workload.engine = Says("7+5=12\n132", lambda request: 3)
    items = [Item(number, {"q": f"{number}+9", "a": "132"}, 3) for number in range(8)]
    for row in workload(items):
        convert_row(workload.columns, row)
    by_text = {}
    for request in workload.engine.asked:
        assert request.prompt.shots in ((("1+1=", "2"),), (("2+2=", "4"),))
        by_text.setdefault(request.prompt.text, []).append(request.prompt.shots)
    assert all(len(shots) == 3 and len({*shots}) == 1 for shots in by_text.values())  # two paths, and a completion
    assert len({shots[0] for shots in by_text.values()}) == 2


def test_a_path_goes_on_behind_the_prompt_as_it_was_cut_and_the_row_counts_the_cut(tmp_path):
    tokenizer = make_tokenizer(tmp_path / "t")
    codec = Codec(tokenizer, EngineOptions(find_model(str(make_llama(tmp_path / "m")))), 200)
    prompt = Prompts("{q}=", truncation_side="left").of({"q": "12" * 150})
    how = Sampling(max_tokens=40, fit=True)
    root = codec.encode(Request(0, prompt, how))
    assert (len(root.tokens), root.n_truncated) == (160, 300 + 1 + 1 - 160)
    begun = tuple(tokenizer("7+5=12\n", add_special_tokens=False)["input_ids"])
    further = codec.encode(Request(0, replace(prompt, so_far="7+5=12\n", generated=Generated(answer=begun)), how))
    assert further.tokens == (*root.tokens, *begun)
    assert further.request.sampling.max_tokens == 40 - len(begun)
    workload = Collect(model=str(tmp_path / "m"), prompt="{q}=", reference="a", paths=2, truncation_side="left")
    workload.engine = Says("7+5=12\n132", lambda request: 3)
    [row] = workload([Item(0, {"q": "47+85", "a": "132"})])
    assert convert_row(workload.columns, row)["n_truncated"] == 3


def test_whole_paths_are_collected_about_images_and_steps_are_not_continued_there(tmp_path):
    llava = str(make_llava(tmp_path))
    settings = {"model": llava, "prompt": "how many?", "images": "photo", "paths": 2, "max_tokens": 4}
    workload = Collect(rollouts=0, checker="exact", precision="fp32", **settings)
    workload.load(TaskContext("cpu", 0, tmp_path))
    items = [Item(number, {"photo": photo, "answer": "3"}, 1) for number, photo in enumerate((make_png(1), b"none"))]
    row, bad = workload(items)
    assert convert_row(workload.columns, row)["n_paths"] == 2
    assert "cannot be read: Pillow does not know its format" in str(bad)
    with pytest.raises(SlurmGPUError, match=r"images is set, .* set rollouts = 0, and no tree"):
        Collect(**settings)
    with pytest.raises(SlurmGPUError, match="images and scorer are both set"):
        Collect(scorer=llava, **settings)
