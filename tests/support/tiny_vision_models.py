"""Tiny random models of real architectures that take images and text, made on the spot, and images for them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.byte_models import make_byte_tokenizer

TURNS = ("<|user|>", "<|system|>", "<|assistant|>", "<|end|>")
PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{% for part in message.content %}"
    "{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_png(seed: int, width: int = 30, height: int = 20, format: str = "PNG", **options: Any) -> bytes:
    """An image of random pixels."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    held = io.BytesIO()
    Image.fromarray(pixels).save(held, format, **options)
    return held.getvalue()


def _text(n_tokens: int, **more: Any) -> dict[str, Any]:
    sizes = {"vocab_size": n_tokens, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    ends = {"bos_token_id": None, "eos_token_id": None}
    return {**sizes, **ends, "initializer_range": 0.3, **more}


def _save(model: Any, folder: Path, tokenizer: Any) -> None:
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.repetition_penalty = 1.3  # which must not be used
    model.save_pretrained(folder)


def make_llava(folder: Path) -> Path:
    """A LLaVA: CLIP for images, and a Llama."""
    import torch
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = make_byte_tokenizer(folder, ("<image>", *TURNS))
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=28,
        patch_size=7,
    )
    torch.manual_seed(0)
    config = LlavaConfig(
        vision_config=vision,
        text_config=LlamaConfig(**_text(len(tokenizer))),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=16,
    )
    _save(LlavaForConditionalGeneration(config), folder, tokenizer)
    LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}),
        tokenizer=tokenizer,
        patch_size=7,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE.replace("IMAGE", "<image>"),
    ).save_pretrained(folder)
    return folder


def make_idefics3(folder: Path, **more: Any) -> Path:
    """An Idefics3, whose processor cuts images into tiles, as many as their sizes need; `more` is about its Llama."""
    import torch
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor, LlamaConfig
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    tiles = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    marks = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *tiles)
    tokenizer = make_byte_tokenizer(folder, (*marks, *TURNS))
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = Idefics3Config(
        vision_config={**vision, "image_size": 32, "patch_size": 8},
        text_config=LlamaConfig(**_text(len(tokenizer), **more)),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
    )
    _save(Idefics3ForConditionalGeneration(config), folder, tokenizer)
    images = Idefics3ImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    template = TEMPLATE.replace("IMAGE", "<image>")
    Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=template).save_pretrained(folder)
    return folder


def make_qwen2_5_vl(folder: Path) -> Path:
    """A Qwen2.5-VL, with images of any size, and positions in three directions."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    pads = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    tokenizer = make_byte_tokenizer(folder, (*pads, *TURNS), TEMPLATE.replace("IMAGE", PLACE))
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    ids = dict(zip(names, tokenizer.convert_tokens_to_ids(pads), strict=True))
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
    vision |= {"patch_size": 4, "spatial_merge_size": 2, "window_size": 32, "fullatt_block_indexes": [1]}
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(vision_config=vision, text_config=_text(len(tokenizer), rope_parameters=rope), **ids)
    _save(Qwen2_5_VLForConditionalGeneration(config), folder, tokenizer)
    return folder


def qwen2_5_vl_processor(folder: Path) -> Any:
    """Its processor, without a part for videos, which needs torchvision."""
    from transformers import AutoTokenizer, Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    class WithoutVideos(Qwen2_5_VLProcessor):
        def __init__(self, image_processor: Any, tokenizer: Any) -> None:
            self.image_processor, self.tokenizer = image_processor, tokenizer
            self.chat_template = tokenizer.chat_template
            self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
            self.image_token_id, self.video_token_id = map(
                tokenizer.convert_tokens_to_ids, (self.image_token, self.video_token)
            )

    images = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, min_pixels=64, max_pixels=1024)
    return WithoutVideos(images, AutoTokenizer.from_pretrained(folder))


def make_gemma3_head(folder: Path) -> Path:
    """A Gemma 3 with one output in place of words: SigLIP for images, which see each other in its masks."""
    import torch
    from transformers import Gemma3Config, Gemma3ForSequenceClassification, Gemma3Processor, PreTrainedTokenizerFast
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    marks = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    make_byte_tokenizer(folder, (*marks.values(), *TURNS))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, extra_special_tokens=marks)
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = Gemma3Config(
        text_config=_text(len(tokenizer), head_dim=16, sliding_window=256, pad_token_id=tokenizer.pad_token_id),
        vision_config={**vision, "image_size": 32, "patch_size": 8},
        mm_tokens_per_image=4,
        image_token_index=tokenizer.image_token_id,
        boi_token_index=tokenizer.boi_token_id,
        eoi_token_index=tokenizer.eoi_token_id,
        num_labels=1,
    )
    model = Gemma3ForSequenceClassification(config)
    torch.nn.init.normal_(model.score.weight, std=1.0)
    torch.nn.init.normal_(
        model.model.multi_modal_projector.mm_input_projection_weight
    )  # zeros, by which nothing is seen
    model.save_pretrained(folder)
    images = Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    template = TEMPLATE.replace("IMAGE", "<start_of_image>")
    Gemma3Processor(images, tokenizer, image_seq_length=4, chat_template=template).save_pretrained(folder)
    return folder
