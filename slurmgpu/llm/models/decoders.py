"""Check from its small files that a model can generate text: a decoder with a tokenizer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from slurmgpu.errors import SlurmGPUError
from slurmgpu.llm.models import hub
from slurmgpu.llm.models.source import VOCABULARIES, ModelSource, named_in, read_json

GENERATES = re.compile(r"CausalLM|LMHead|ConditionalGeneration|Decoder")
"""Parts of class names that mean a model generates text."""

OTHER_HEADS = re.compile(
    "For(MaskedLM|PreTraining|SequenceClassification|TokenClassification|QuestionAnswering|MultipleChoice|"
    "NextSentencePrediction|ImageClassification|CTC|RewardModel|ProcessRewardModel)$"
)

ENCODERS = (
    *("albert", "bert", "camembert", "convbert", "deberta", "deberta-v2", "distilbert", "electra", "ernie", "esm"),
    *("eurobert", "fnet", "funnel", "ibert", "longformer", "luke", "mobilebert", "modernbert", "mpnet", "mra"),
    *("nomic_bert", "nystromformer", "roberta", "roberta-prelayernorm", "roformer", "squeezebert", "xlm-roberta"),
    *("xlm-roberta-xl", "xmod", "yoso"),
)
"""Values of model_type for encoders, unless `architectures` has a generating class. From transformers 5.23."""

_WITH_IMAGES = """
    apertus1p5 aria aya_vision blip blip-2 chameleon cohere2_vision cohere_compass cosmos3_edge cosmos3_omni
    deepseek_ocr2 deepseek_vl deepseek_vl_hybrid diffusion_gemma ernie4_5_vl_moe evolla exaone4_5 fast_vlm
    florence2 glm46v glm4v glm4v_moe glm5_next glm_ocr glmga granite4_vision granite_docling hunyuan_vl hy_v4_vl
    hyperclovax_vision_v2 idefics idefics2 idefics3 inkling2 inkling2_loop inkling_mm_model instructblip
    instructblipvideo internvl janus kimi_k25 kosmos-2 kosmos-2.5 lfm2_vl lfm3_vl lighton_ocr llava llava_next
    llava_next_video llava_onevision minicpm_ocr minicpmv4_6 minicpmv4_7 minimax_m3_vl mistral3 mistral4
    mistral_large4 molmo2 muse_glimmer muse_spark nemotron_h_omni ovis2 paddleocr_vl paligemma perception_lm pi0
    pix2struct pp_chart2table pp_formulanet qianfan_ocr qwen2_5_omni_thinker qwen2_5_vl qwen2_vl
    qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe shieldgemma2 smolvlm step3p7 t5gemma2 udop unlimited_ocr
    video_llama_3 video_llava vipllava vision-encoder-decoder
"""

WITH_IMAGES = frozenset(_WITH_IMAGES.split())
"""Model types that transformers 5.24 has only for images with text, not for text alone; a test compares."""

IMAGE_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
"""A model that takes images has at least one of these files."""

WITHOUT_VOCABULARY = ("ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer")
"""Tokenizers of bytes and code points."""


def check_decoder(source: ModelSource) -> None:
    """Refuse an encoder or a classifier, whose generated text would be random."""
    named = [str(name) for name in source.config.get("architectures") or ()]
    if any(GENERATES.search(name) for name in named):
        return
    kind = str(source.config.get("model_type"))
    if kind in ENCODERS or (named and all(OTHER_HEADS.search(name) for name in named)):
        raise SlurmGPUError(
            f"model {source.name!r} is a {' and '.join(named) or kind} by its config.json, which does not generate "
            f"text; expected a decoder with a language-model head, such as LlamaForCausalLM or Qwen3ForCausalLM. To "
            f"score texts with a classifier or a reward model, use score, or judge with scorer instead of model; to "
            f"embed texts, use embed."
        )


def check_not_encoder_decoder(name: str, config: Mapping[str, Any]) -> None:
    """Refuse an encoder-decoder model by its configuration."""
    if config.get("is_encoder_decoder"):
        raise SlurmGPUError(
            f"{name} is an encoder-decoder model ({config['model_type']}), which the engine transformers does not "
            "support; expected a decoder such as Llama, Qwen or gpt-oss."
        )


def check_takes_text_alone(source: ModelSource) -> None:
    """Refuse a model that transformers loads only for images with text."""
    kind = source.config.get("model_type")
    if kind in WITH_IMAGES and "auto_map" not in source.config:
        raise SlurmGPUError(
            f"model {source.name!r} has the type {kind}, which transformers loads only for images with text, and "
            "images is not set. Set images to the item field with images, or choose a text-only model, or set "
            'engine = "vllm".'
        )


def check_takes_images(source: ModelSource) -> None:
    """Refuse a model without an image processor."""
    if any((source.folder / name).is_file() for name in IMAGE_PROCESSORS):
        return
    raise SlurmGPUError(
        f"images is set, and model {source.name!r} takes no images: {source.folder} has neither "
        f"{' nor '.join(IMAGE_PROCESSORS)}. Choose a model that takes images with text, such as Qwen2.5-VL, LLaVA or "
        "Gemma 3, or copy the file from the place of the weights."
    )


def check_tokenizer(source: ModelSource) -> None:
    """Refuse a folder without a tokenizer."""
    folder = source.folder
    if named_in(folder, VOCABULARIES):
        return
    own = read_json(folder / "tokenizer_config.json")
    if "auto_map" in own or own.get("tokenizer_class") in WITHOUT_VOCABULARY:
        return
    advice = (
        "Copy it from the base model, in Python with tokenizer.save_pretrained(folder)."
        if source.repository is None
        else f"{hub.FETCH}, if the repository has one."
    )
    raise SlurmGPUError(
        f"model {source.name!r}: there is no tokenizer in {folder}; expected tokenizer.json, tokenizer.model or "
        f"vocab.json next to the weights. {advice}"
    )
