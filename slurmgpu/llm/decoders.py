"""Whether a folder holds what generates text: a decoder, and a tokenizer. Told from its small files."""

from __future__ import annotations

import re

from slurmgpu.errors import SlurmGPUError
from slurmgpu.llm import hub
from slurmgpu.llm.models import VOCABULARIES, ModelSource, read_json

GENERATES = re.compile(r"CausalLM|LMHead|ConditionalGeneration|Decoder")
"""What is in the names of the classes that generate text."""

OTHER_HEADS = re.compile(
    "For(MaskedLM|PreTraining|SequenceClassification|TokenClassification|QuestionAnswering|MultipleChoice|"
    "NextSentencePrediction|ImageClassification|CTC)$"
)

ENCODERS = (
    *("albert", "bert", "camembert", "convbert", "deberta", "deberta-v2", "distilbert", "electra", "ernie", "esm"),
    *("eurobert", "fnet", "funnel", "ibert", "longformer", "luke", "mobilebert", "modernbert", "mpnet", "mra"),
    *("nomic_bert", "nystromformer", "roberta", "roberta-prelayernorm", "roformer", "squeezebert", "xlm-roberta"),
    *("xlm-roberta-xl", "xmod", "yoso"),
)
"""Values of model_type that are encoders, unless a class that generates is named. From transformers 5.23."""

WITHOUT_VOCABULARY = ("ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer")
"""Tokenizers of bytes and code points."""


def check_decoder(source: ModelSource) -> None:
    """Refuse an encoder or a classifier: as a generating model it would answer at random."""
    named = [str(name) for name in source.config.get("architectures") or ()]
    if any(GENERATES.search(name) for name in named):
        return
    kind = str(source.config.get("model_type"))
    if kind in ENCODERS or (named and all(OTHER_HEADS.search(name) for name in named)):
        raise SlurmGPUError(
            f"model {source.name!r} is of the kind {' and '.join(named) or kind} (so its config.json), which does not "
            f"generate text; expected a decoder with a head for text, such as a LlamaForCausalLM or a "
            f"Qwen3ForCausalLM. For vectors of texts there is the workload embed."
        )


def check_tokenizer(source: ModelSource) -> None:
    """Refuse a folder without any file of a tokenizer."""
    folder = source.folder
    if any(next(folder.glob(pattern), None) for pattern in VOCABULARIES):
        return
    own = read_json(folder / "tokenizer_config.json")
    if "auto_map" in own or own.get("tokenizer_class") in WITHOUT_VOCABULARY:
        return
    advice = (
        "Copy it there from the model that this one was made from; in Python: tokenizer.save_pretrained(folder)."
        if source.repository is None
        else f"{hub.FETCH}, if the repository has one."
    )
    raise SlurmGPUError(
        f"model {source.name!r}: there is no tokenizer in {folder}; expected tokenizer.json, tokenizer.model or "
        f"vocab.json beside the weights. {advice}"
    )
