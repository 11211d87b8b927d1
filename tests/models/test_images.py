"""Images beside text: from an item's field into the model, and what becomes of those that cannot be read."""

import io
import json
import struct
import zlib

import h5py
import numpy as np
import pytest
from PIL import Image

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.llm.engines import open_engine
from slurmgpu.llm.interface.engine import EngineOptions, Place, Prompt, Question, Request, Sampling, Structure
from slurmgpu.llm.models.decoders import WITH_IMAGES
from slurmgpu.llm.models.source import find_model
from slurmgpu.llm.prompts import image_prompts
from slurmgpu.llm.prompts.images import open_image, sources_of
from slurmgpu.workload import Item, Share, TaskContext
from slurmgpu.workloads.classify.workload import Classify
from slurmgpu.workloads.generate.workload import Generate
from tests.support.runs import report, toml
from tests.support.tiny_models import make_llama
from tests.support.tiny_vision_models import (
    make_idefics3,
    make_llava,
    make_png,
    make_qwen2_5_vl,
    qwen2_5_vl_processor,
)

MAKERS = {"llava": make_llava, "idefics3": make_idefics3, "qwen2_5_vl": make_qwen2_5_vl}
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory, one_thread):
    return {name: make(tmp_path_factory.mktemp(name)) for name, make in MAKERS.items()}


@pytest.fixture(scope="module")
def engines(folders):
    from transformers import AutoProcessor

    found = {}
    with pytest.MonkeyPatch.context() as patch:
        for name, folder in folders.items():
            if name == "qwen2_5_vl":
                patch.setattr(AutoProcessor, "from_pretrained", lambda path, **more: qwen2_5_vl_processor(path))
            found[name] = engine(folder)
    return found


def engine(folder, **options):
    options = {"precision": "fp32", "images": True, **options}
    return open_engine(EngineOptions(find_model(str(folder)), **options), Place("cpu"))


def requests_of(prompts, temperature=0.0, **sampling):
    how = {"max_tokens": 6, "logprobs": True, **sampling}
    lengths = [how["max_tokens"] + number % 3 for number in range(len(prompts))]
    return [
        Request(number, prompt, Sampling(**{**how, "temperature": temperature, "max_tokens": n}), key=number + 7)
        for number, (prompt, n) in enumerate(zip(prompts, lengths, strict=True))
    ]


def prompts_of(n):
    """Prompts of several lengths, with one image or two of several sizes."""
    return [
        Prompt(
            f"What is in it, of {'many ' * (number % 3)}things?",
            system="Be brief." if number % 2 else "",
            images=tuple(make_png(10 * number + part, 20 + 9 * number, 30) for part in range(1 + number % 2)),
        )
        for number in range(n)
    ]


def answers(ours, requests):
    found = {output.id: output for output in ours.generate(requests)}
    assert len(found) == len(requests)
    return [found[request.id] for request in requests]


def _inputs_alone(ours, prompt, more=""):
    """What transformers makes of one prompt, in which nothing looks like a special token."""
    processor = ours._prompts._processor
    system = [{"role": "system", "content": [{"type": "text", "text": prompt.system}]}]
    images = [open_image(source) for source in prompt.images]
    content = [*({"type": "image"} for _ in images), {"type": "text", "text": prompt.text}]
    messages = [*(system if prompt.system else []), {"role": "user", "content": content}]
    text = processor.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return processor(text=[text + more], images=images, add_special_tokens=False, return_tensors="pt")


def alone(ours, request):
    """The answer of transformers' own greedy loop to one prompt."""
    import torch

    model, inputs = ours._batches._model._loaded.model, _inputs_alone(ours, request.prompt)
    with torch.inference_mode():
        found = model.generate(
            **inputs, do_sample=False, max_new_tokens=request.sampling.max_tokens, eos_token_id=256, pad_token_id=0
        )
    return found[0, inputs["input_ids"].shape[1] :].tolist()


# The model


@pytest.mark.parametrize("name", MAKERS)
def test_answers_of_a_batch_are_those_of_transformers_to_each_prompt_alone(engines, name):
    requests = requests_of(prompts_of(5))
    found = answers(engines[name], requests)
    assert [each.tokens.tolist() for each in found] == [alone(engines[name], request) for request in requests]
    single = [answers(engines[name], [request])[0] for request in requests]
    for one, other in zip(found, single, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-4)
        assert one.n_prompt_tokens == other.n_prompt_tokens


@pytest.mark.parametrize("name", MAKERS)
def test_another_image_or_another_order_of_images_is_another_answer(engines, name):
    one, two = make_png(1), make_png(2)
    prompts = [Prompt("What?", images=images) for images in ((one,), (two,), (one, two), (two, one))]
    found = answers(engines[name], requests_of(prompts))
    assert len({each.logprobs[0].item() for each in found}) == 4
    assert found[2].n_prompt_tokens > found[0].n_prompt_tokens


def test_a_sample_depends_on_its_key_alone(engines, monkeypatch):
    requests = requests_of(prompts_of(5), temperature=1.0)
    whole = [each.tokens.tolist() for each in answers(engines["llava"], requests)]
    monkeypatch.setattr(engines["llava"]._batches._budget, "tokens", 150)
    assert [each.tokens.tolist() for each in answers(engines["llava"], requests[::-1])] == whole[::-1]
    assert whole != [each.tokens.tolist() for each in answers(engines["llava"], requests_of(prompts_of(5)))]


@pytest.mark.parametrize("name", MAKERS)
def test_scores_of_a_batch_are_those_of_each_choice_behind_each_prompt_alone(engines, name):
    choices = ("cat", "car", "dog")
    questions = [Question(number, prompt, choices) for number, prompt in enumerate(prompts_of(4))]
    found = {scores.id: scores for scores in engines[name].score(questions)}
    for question in questions:
        expected = [_sum_alone(engines[name], question.prompt, choice) for choice in choices]
        np.testing.assert_allclose(found[question.id].logprobs, expected, atol=2e-4)
        assert found[question.id].n_tokens.tolist() == [3, 3, 3]
    assert len({scores.logprobs[0] for scores in found.values()}) == 4


def _sum_alone(ours, prompt, choice):
    """ln p of a choice, of one forward pass of transformers over prompt and choice."""
    import torch

    inputs = _inputs_alone(ours, prompt, choice)
    with torch.inference_mode():
        logprobs = ours._batches._model._loaded.model(**inputs).logits[0].log_softmax(-1)
    ids = inputs["input_ids"][0]
    return sum(logprobs[place - 1, ids[place]].item() for place in range(len(ids) - len(choice), len(ids)))


def test_a_bad_question_fails_alone_and_memory_that_runs_out_loses_no_score(engines, monkeypatch):
    ours = engines["llava"]
    prompts = [*prompts_of(3), Prompt("?", images=(b"abc",)), Prompt("x" * 500, images=(make_png(1),))]
    questions = [Question(number, prompt, ("a", "bb")) for number, prompt in enumerate(prompts)]
    expected = {scores.id: scores for scores in ours.score(questions)}
    assert [expected[n].error is None for n in range(5)] == [True, True, True, False, False]
    assert "of 3 bytes cannot be read" in expected[3].error
    assert "with its choices exceeds the context of 512 tokens" in expected[4].error
    model = ours._batches._model._loaded.model
    generate = model.generate

    def failing(input_ids, **more):
        if len(input_ids) > 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return generate(input_ids=input_ids, **more)

    monkeypatch.setattr(model, "generate", failing)
    monkeypatch.setattr(ours._batches._budget, "tokens", ours._batches._budget.tokens)
    for scores in ours.score(questions[:3]):
        np.testing.assert_allclose(scores.logprobs, expected[scores.id].logprobs, atol=2e-4)


def test_memory_that_runs_out_halves_the_batch_and_loses_nothing(engines, monkeypatch):
    ours, requests = engines["idefics3"], requests_of(prompts_of(5))
    expected = [each.tokens.tolist() for each in answers(ours, requests)]
    model = ours._batches._model._loaded.model
    generate, seen = model.generate, []

    def failing(input_ids, **more):
        seen.append(len(input_ids))
        if len(input_ids) > 2:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return generate(input_ids=input_ids, **more)

    monkeypatch.setattr(model, "generate", failing)
    assert [each.tokens.tolist() for each in answers(ours, requests)] == expected
    assert seen[0] == 5
    assert sum(n for n in seen if n <= 2) == 5
    monkeypatch.setattr(model, "generate", lambda **more: failing([0, 0, 0]))
    [found] = answers(ours, requests[:1])
    assert found.error.startswith("out of memory for this prompt alone, which has ")


def test_tensors_of_many_images_are_not_held_at_once(engines, monkeypatch):
    ours, asked = engines["llava"], requests_of(prompts_of(5))
    questions = [Question(number, each.prompt, ("a", "bc")) for number, each in enumerate(asked)]
    whole, scores = answers(ours, asked), [each.logprobs for each in sorted(ours.score(questions), key=lambda s: s.id)]
    run, held = ours._batches.generate, []
    monkeypatch.setattr(image_prompts, "MOST_BYTES", 1)
    monkeypatch.setattr(ours._batches, "generate", lambda some: held.append(len(some)) or run(some))
    for one, other in zip(whole, answers(ours, asked), strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
    assert held == [1] * 5
    for found in ours.score(questions):
        np.testing.assert_allclose(found.logprobs, scores[found.id], atol=1e-5)


def test_answers_are_kept_to_a_structure_and_end_at_a_stop_text(engines):
    prompts = prompts_of(2)
    choices = Structure("choices", json.dumps(["cat", "dog"]))
    found = answers(engines["llava"], requests_of(prompts, max_tokens=8, structure=choices))
    assert {each.text for each in found} <= {"cat", "dog"}
    free = answers(engines["llava"], requests_of(prompts, max_tokens=12))
    stop = next(character for character in free[0].text[1:] if character.isascii())
    stopped = answers(engines["llava"], requests_of(prompts[:1], max_tokens=12, stop=(stop,)))[0]
    assert stopped.finish_reason == "stop"
    assert stopped.text == free[0].text.split(stop)[0]


@pytest.mark.parametrize(("name", "place"), [("llava", "<image>"), ("qwen2_5_vl", "<|image_pad|>")])
def test_what_looks_like_an_image_in_an_item_is_text(engines, name, place):
    image = (make_png(3),)
    plain, marked = answers(
        engines[name], requests_of([Prompt("What?", images=image), Prompt(f"What?{place}", images=image)])
    )
    assert marked.error is None
    assert marked.n_prompt_tokens == plain.n_prompt_tokens + len(place)  # a token for each byte


def test_images_go_into_the_first_turn_of_a_chat_and_behind_examples(engines):
    image = (make_png(3),)
    turns = ({"role": "user", "content": "What?"}, {"role": "assistant", "content": "A."})
    chat = Prompt(messages=(*turns, {"role": "user", "content": "Why?"}), images=image)
    shots = Prompt("Why?", shots=(("What?", "A."),), images=image)
    texts = [engines["llava"]._codec.render(each)[0] for each in (chat, shots)]
    asked, said, last = "<|user|>{}What?<|end|>", "<|assistant|>A.<|end|>", "<|user|>{}Why?<|end|><|assistant|>"
    assert texts[0] == asked.format("<image>") + said + last.format("")
    assert texts[1] == asked.format("") + said + last.format("<image>")


# Images


def test_a_bad_image_is_its_items_error_and_its_neighbours_are_computed(engines, tmp_path):
    good = make_png(1)
    (tmp_path / "empty.png").touch()
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "cut.jpg").write_bytes(make_png(1, 200, 200, "JPEG")[:3000])
    (tmp_path / "thin.png").write_bytes(make_png(1, 40, 2))
    size = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    head = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + b"IHDR" + size + struct.pack(">I", zlib.crc32(b"IHDR" + size))
    (tmp_path / "bomb.png").write_bytes(head + struct.pack(">I", 0) + b"IEND" + struct.pack(">I", zlib.crc32(b"IEND")))
    Image.fromarray(np.full((9, 9), 60_000, np.uint16)).save(tmp_path / "grey.png")
    cases = {
        "nowhere.png": "cannot be read: No such file or directory",
        ".": "cannot be read: Is a directory",
        "empty.png": "is empty: it has 0 bytes",
        "text.png": "cannot be read: Pillow does not know its format",
        "cut.jpg": "cannot be read: image file is truncated",
        "thin.png": "has 40 × 2 pixels; expected at least 4 in each direction",
        "bomb.png": "cannot be read: Image size (10000000000 pixels) exceeds limit",
        "grey.png": "has more than 8 bits of grey (I;16)",
    }
    sources = [good, *(str(tmp_path / name) for name in cases), good]
    first, *bad, last = answers(engines["llava"], requests_of([Prompt("?", images=(source,)) for source in sources]))
    assert first.tokens.tolist() == last.tokens.tolist()[: len(first.tokens)]
    assert first.error is None
    for found, (name, said) in zip(bad, cases.items(), strict=True):
        assert said in found.error, name
        assert str(tmp_path / name) in found.error


def test_an_image_is_seen_upright_and_in_rgb():
    pixels = np.zeros((4, 8, 3), np.uint8)
    pixels[:, :4] = 255  # white at the left
    held, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6  # to be turned by 90° clockwise
    Image.fromarray(pixels).save(held, "PNG", exif=exif)
    found = open_image(held.getvalue())
    assert found.size == (4, 8)
    assert np.asarray(found)[0, 0].tolist() == [255, 255, 255]  # now at the top
    assert np.asarray(found)[7, 0].tolist() == [0, 0, 0]
    for mode in ("L", "P", "RGBA", "1", "CMYK"):
        held = io.BytesIO()
        Image.fromarray(pixels).convert(mode).save(held, "TIFF")
        assert np.array_equal(np.asarray(open_image(held.getvalue())), pixels), mode


def test_a_field_holds_paths_or_bytes_as_hugging_face_has_them():
    assert sources_of("image", "a/b.png", "photos") == ("photos/a/b.png",)
    assert sources_of("image", "/a/b.png", "photos") == ("/a/b.png",)
    assert sources_of("image", b"abc") == (b"abc",)
    assert sources_of("image", [{"bytes": b"abc", "path": "b.png"}, {"bytes": None, "path": "b.png"}, "c.png"]) == (
        b"abc",
        "b.png",
        "c.png",
    )
    for value, said in [
        (None, "has no image"),
        ([], "is an empty list"),
        ("", "has no image"),
        ({"bytes": None}, "has no image"),
        (3, "holds 3; expected a path"),
        ("https://x.org/a.png", "holds the URL 'https://x.org/a.png', and tasks do not download"),
    ]:
        with pytest.raises(ItemError, match="field 'image'") as raised:
            sources_of("image", value)
        assert said in str(raised.value)


# Planning


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"images": ""}, "images is empty; expected the name of the item field"),
        ({"images": None, "prompt": "What?"}, "prompt is 'What?', which has no field"),
        ({"images": None, "image_folder": "x"}, "image_folder is set, and images is not"),
        ({"image_folder": "/nowhere"}, "image_folder: there is no folder /nowhere"),
        ({"chat": False}, "chat is false, and images is set: only a chat template has a place for images"),
        ({"truncation_side": "left"}, "truncation_side is set, which is for prompts without images"),
        ({"adapter": "/nowhere"}, "adapter is set, which is for prompts without images"),
        ({"batching": "continuous"}, 'batching is "continuous", which does not support images'),
        ({"engine": "server", "url": "http://h:1", "image_folder": "/nowhere"}, "there is no folder /nowhere"),
    ],
)
def test_a_setting_that_does_not_go_with_images_is_refused_in_a_sentence(folders, settings, sentence):
    given = {"model": str(folders["llava"]), "prompt": "{text}", "images": "image", **settings}
    with pytest.raises(SlurmGPUError) as raised:
        Generate(**{name: value for name, value in given.items() if value is not None}).place(Share(0))
    assert sentence in str(raised.value)


def test_a_model_without_images_and_images_without_a_model_for_them_are_refused(folders, tmp_path):
    text_only = str(make_llama(tmp_path / "model"))
    with pytest.raises(SlurmGPUError, match=r"takes no images: .* has neither preprocessor_config.json"):
        Generate(model=text_only, prompt="What?", images="image").place(Share(0))
    with pytest.raises(SlurmGPUError, match="has the type llava, which transformers loads only for images with text"):
        Generate(model=str(folders["llava"]), prompt="{text}").place(Share(0))
    with pytest.raises(SlurmGPUError, match="has the type llava, which AutoModelForCausalLM of transformers does not"):
        engine(folders["llava"], images=False)
    with pytest.raises(SlurmGPUError, match="calibrate scores the prompt without an item, and images is set"):
        Classify(model=text_only, labels=["a", "b"], prompt="What?", images="image", calibrate=True)


def test_planning_knows_the_size_of_a_model_that_takes_images_and_splits_it_by_layers(folders):
    ours = Generate(model=str(folders["llava"]), prompt="What?", images="image", max_tokens=8)
    one = ours.place(Share(1, gpu_memory=80_000_000_000))
    n_weights = sum(np.prod(shape) for shape in _shapes(folders["llava"] / "model.safetensors"))
    assert f"{n_weights:,.0f} parameters" in one.lines[0]
    assert "256 bytes a token" in one.lines[0]  # 2 layers, keys and values, 2 heads of 16 numbers, 2 bytes
    two = ours.place(Share(2, gpu_memory=1_700_000_000))
    assert two.processes == "one"
    assert ours.batch_size == 32


def test_types_for_images_alone_are_those_that_transformers_has():
    from transformers.models.auto import modeling_auto

    of_images = set(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    of_text = set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert of_images - of_text <= WITH_IMAGES  # an older transformers has fewer
    assert not WITH_IMAGES & of_text


def _shapes(path):
    from safetensors import safe_open

    with safe_open(path, "np") as file:
        return [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118


# Runs


def test_a_folder_of_images_is_a_run_in_which_a_damaged_one_fails_alone(folders, tmp_path, slurmgpu):
    (tmp_path / "photos").mkdir()
    for number in range(5):
        (tmp_path / "photos" / f"{number}.png").write_bytes(make_png(number))
    (tmp_path / "photos" / "2.png").write_bytes(make_png(2)[:400])
    settings = {"model": str(folders["llava"]), "images": "path", "prompt": "What is {key}?", "max_tokens": 4}
    settings |= {"precision": "fp32", "keep": ["key"]}
    top = {"input": "photos/*.png", "run_dir": "run", "html": False}
    lines = [f"{key} = {toml(value)}\n" for key, value in top.items()]
    lines += ["[workload]\n", 'use = "generate"\n', "[settings]\n"]
    lines += [f"{key} = {toml(value)}\n" for key, value in settings.items()]
    (tmp_path / "slurmgpu.toml").write_text("".join(lines))
    slurmgpu("submit", "--executor", "debug", "--gpus", "0", cwd=tmp_path, expect=0, **ONE_THREAD)
    found = report(tmp_path)
    assert (found["n_items"], found["summary"]["n_failed"]) == (5, 1)
    with h5py.File(tmp_path / "run" / "merged.h5") as merged:
        assert merged["n_tokens"][:].tolist() == [4, 4, 0, 4, 4]


@pytest.mark.parametrize("method", ["parse", "score"])
def test_images_are_classified_by_an_answer_or_by_scores(folders, tmp_path, method):
    more = {"max_tokens": 4} if method == "parse" else {}
    ours = Classify(
        model=str(folders["llava"]),
        labels=["cat", "dog"],
        prompt="{labels}?",
        images="image",
        image_folder=str(tmp_path),
        method=method,
        precision="fp32",
        **more,
    )
    (tmp_path / "a.png").write_bytes(make_png(1))
    ours.load(TaskContext("cpu", 0, tmp_path))
    rows = ours([Item(0, {"image": "a.png"}), Item(1, {"image": "b.png"}), Item(2, {"image": make_png(1)})])
    assert rows[0].keys() == ours.columns.keys()
    assert rows[0]["label"] == rows[2]["label"]
    assert method == "parse" or rows[0]["label"] in ("cat", "dog")
    assert "b.png cannot be read: No such file" in str(rows[1])
    assert ours.paths == [folders["llava"], tmp_path]
