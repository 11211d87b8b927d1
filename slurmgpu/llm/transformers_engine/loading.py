"""Load a model and its tokenizer on GPUs or the CPU."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from slurmgpu.errors import SlurmGPUError
from slurmgpu.llm.interface.engine import TORCH_NAMES, EngineOptions, Place
from slurmgpu.llm.models.decoders import check_not_encoder_decoder
from slurmgpu.llm.models.lora import Switch, hold_adapters, merge_adapter
from slurmgpu.llm.models.sizes import experts_of
from slurmgpu.llm.prompts.vocabulary import eos_ids_of
from slurmgpu.llm.transformers_engine.caches import ARGUMENTS, argument_of, keyword_of, new_cache, takes_keywords
from slurmgpu.llm.transformers_engine.quantization import quantization_config
from slurmgpu.llm.transformers_engine.weight_layout import store_by_columns
from slurmgpu.util.allocator import keep_freed_memory
from slurmgpu.util.amounts import some_of
from slurmgpu.util.exceptions import described
from slurmgpu.util.logging import quiet

log = logging.getLogger(__name__)

OWN_CACHES = ("minimax", "openai-gpt", "reformer", "rwkv", "xlnet", "xlstm")
"""Model types with another kind of cache, or none, from generation/utils.py of transformers 5.23."""

COLLECTIVE_LIMIT = timedelta(hours=2)
"""Loading a large model takes tens of minutes, differently on each rank; NCCL's default is ten minutes."""

HINTS = {
    "AutoModelForCausalLM": " If it takes images with text, set images to the item field with images.",
    "AutoModelForImageTextToText": " Choose a model that takes images with text and answers in text, or remove images.",
}
"""Advice for a model type that one of transformers' Auto classes does not know."""

FEW = 3
"""The number of wrong weights that a message names."""


@dataclass(frozen=True)
class Loaded:
    """A loaded model and its tokenizer.

    `eos_ids` end an answer; `context` is the most tokens of prompt and answer; `kv_bytes` are the cache's bytes for a
    token on the fullest device; `device` has token ids and logits; `switch` switches between adapters.
    """

    model: Any
    tokenizer: Any
    eos_ids: frozenset[int]
    context: int
    kv_bytes: int
    device: Any
    switch: Switch | None = None

    @property
    def pad_id(self) -> int:
        """The token for padding; 0 if the tokenizer's was added without making the model larger."""
        found = self.tokenizer.pad_token_id
        return int(found) if found is not None and found < self.n_known else 0

    @property
    def n_known(self) -> int:
        """The number of tokens that the model has embeddings for: Llama 3.2 Vision's has 8 more than its vocabulary."""
        named = getattr(self.model.config.get_text_config(), "vocab_size", None) or sys.maxsize
        try:
            embeddings = self.model.get_input_embeddings()
        except NotImplementedError:  # of CANINE, which takes any character, and of some models with their own code
            return named
        return max(named, getattr(embeddings, "num_embeddings", 0))


def load_model(options: EngineOptions, place: Place) -> Loaded:
    """Load the model and its tokenizer on the device, the GPUs or the process group of `place`."""
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

    started = time.monotonic()
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(options.model.folder)}
    source |= {"revision": options.model.revision, "trust_remote_code": options.trust_remote_code}
    config = AutoConfig.from_pretrained(**source)
    kind = {"is_encoder_decoder": getattr(config, "is_encoder_decoder", False), "model_type": config.model_type}
    check_not_encoder_decoder(options.model.name, kind)
    if config.model_type in OWN_CACHES:
        raise SlurmGPUError(
            f"{options.model.name} has the type {config.model_type}, and the engine transformers does not support its "
            'cache; expected a decoder such as Llama, Qwen or gpt-oss. engine = "vllm" may support the model.'
        )
    _check_memory(options, place)
    prepare(options, place)
    tokenizer = AutoTokenizer.from_pretrained(**source, padding_side="left")
    auto = AutoModelForImageTextToText if options.images else AutoModelForCausalLM
    advice = "a model without a language-model head cannot generate text"
    model = load_whole(options, place, {**source, "config": config}, auto, advice)
    if not options.images and argument_of(model) is None and not takes_keywords(model):
        raise SlurmGPUError(_without_cache(model, options))
    switch = None
    if options.adapters.choice is not None:
        switch = hold_adapters(model, options.adapters)
    elif options.adapters.sources:
        model = merge_adapter(model, options.adapters.sources[""])
    model.eval()
    if place.device == "cpu" and place.world_size == 1:
        store_by_columns(model)
    # From the checkpoint's generation config only the end tokens are used, not its sampling.
    eos_ids = eos_ids_of(model.generation_config, config.get_text_config(), tokenizer)
    try:
        kv_bytes = _kv_bytes(model)
    except (AttributeError, TypeError, ValueError) as error:
        if argument_of(model) is None and isinstance(error, TypeError):  # a keyword that no forward pass takes
            raise SlurmGPUError(_without_cache(model, options)) from error
        raise SlurmGPUError(  # such as a model whose cache is of a class of its own
            f"{options.model.name} is a {type(model).__name__}, which fails with the cache of transformers "
            f'{transformers.__version__}: {described(error)}. Use a later transformers, or try engine = "vllm".'
        ) from error
    loaded = Loaded(model, tokenizer, eos_ids, _context(options, config), kv_bytes, model.device, switch)
    log_loaded(loaded, place, options, time.monotonic() - started)
    return loaded


def load_whole(options: EngineOptions, place: Place, source: Mapping[str, Any], auto: Any, advice: str) -> Any:
    """The model that the Auto class loads from a source; SlurmGPUError, with `advice`, if weights are missing.

    It has the precision of the options, or is quantised, and is on the device, the GPUs or the group of `place`.
    """
    import torch

    arguments = {**source, "dtype": getattr(torch, TORCH_NAMES[options.precision])}
    arguments |= where_on(options, place, source["config"], auto)
    if (quantization := quantization_config(options, place)) is not None:
        arguments["quantization_config"] = quantization
    model, report = from_pretrained(arguments, auto)
    check_whole(model, report, f"{options.model.name}, in {options.model.folder},", advice)
    return model


def prepare(options: EngineOptions, place: Place) -> None:
    """Before a model is loaded: set up the process, and read the weights ahead."""
    from transformers.utils.logging import disable_progress_bar

    from slurmgpu.llm.models.kernels import choose_kernels
    from slurmgpu.llm.models.read_ahead import read_ahead
    from slurmgpu.llm.transformers_engine import attention

    attention.register()
    if place.device == "cpu":
        keep_freed_memory()
    choose_kernels(options.precision)
    read_ahead(options.model.folder)
    disable_progress_bar()  # logs are files


def _without_cache(model: Any, options: EngineOptions) -> str:
    return (
        f"{options.model.name} is a {type(model).__name__}, whose forward pass takes no cache "
        f"({' or '.join(ARGUMENTS)}), so the engine transformers does not support it; expected a "
        "decoder such as Llama, Qwen or gpt-oss."
    )


def _check_memory(options: EngineOptions, place: Place) -> None:
    import torch

    from slurmgpu.llm.placement.place import check_fits

    if place.device != "cpu":
        memory = torch.cuda.get_device_properties(place.device).total_memory
        n_gpus = place.world_size if place.world_size > 1 else max(1, place.gpus)
        check_fits(options, memory, n_gpus, tensor_parallel=place.world_size > 1)


def even_device_map(
    auto: Any, config: Any, n_devices: int, dtype: Any, *, trust_remote_code: bool = False
) -> dict[str, int]:
    """The device of each part of a model on `n_devices`, with the least possible memory on the fullest device.

    `auto` is the model's Auto class. Accelerate's own maps fill the first devices, and leave no room for the cache
    there.
    """
    from accelerate import infer_auto_device_map, init_empty_weights

    with init_empty_weights():
        model = auto.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    whole = list(getattr(model, "_no_split_modules", None) or ())
    size = sum(each.numel() * each.element_size() for each in {*model.parameters(), *model.buffers()})

    def map_within(limit: int) -> dict[str, int] | None:
        # Accelerate keeps room for a layer on the first device, here a dummy of no size.
        memory = {0: 0} | dict.fromkeys(range(1, n_devices + 1), limit)
        with quiet("accelerate"):
            found = infer_auto_device_map(model, memory, whole, dtype=dtype, offload_buffers=True)
        if not all(isinstance(device, int) for device in found.values()):
            return None
        return {name: device - 1 for name, device in found.items()}

    # Bisect the smallest limit that holds the model, to a percent.
    low, high = size // n_devices, 2 * size
    best = map_within(high) or {"": 0}
    while high - low > size // n_devices // 100 + 1:
        limit = (low + high) // 2
        found = map_within(limit)
        if found is None:
            low = limit
        else:
            best, high = found, limit
    return best


def where_on(options: EngineOptions, place: Place, config: Any, auto: Any) -> dict[str, Any]:
    """Arguments of `from_pretrained` that put a model on the device, the GPUs or the group of `place`."""
    import torch

    if place.world_size > 1:
        return {"distributed_config": _distributed(place, config)}
    if place.device == "cpu":
        return {"device_map": "cpu"}
    if place.gpus > 1:
        dtype = getattr(torch, TORCH_NAMES[options.precision])
        trusted = options.trust_remote_code
        return {"device_map": even_device_map(auto, config, place.gpus, dtype, trust_remote_code=trusted)}
    return {"device_map": place.device}


def _distributed(place: Place, config: Any) -> Any:
    """How the model is shared in a process group: matrices are split, and experts distributed."""
    import torch
    from torch import distributed
    from transformers.distributed import DistributedConfig

    on_gpu = place.device != "cpu"
    if on_gpu:
        torch.cuda.set_device(place.device)
    if not distributed.is_initialized():
        # This makes collectives in CUDA graphs, as in continuous batching, slower; NCCL reads it only here.
        os.environ.setdefault("NCCL_GRAPH_MIXING_SUPPORT", "0")
        # torchrun sets address and rank in the environment.
        bound = {"device_id": torch.device(place.device)} if on_gpu else {}
        distributed.init_process_group("nccl" if on_gpu else "gloo", timeout=COLLECTIVE_LIMIT, **bound)
    # Never pp_size: it generates wrong tokens in transformers 5.23.
    wanted: dict[str, Any] = {"tp_size": place.world_size}
    text = config.get_text_config()
    if experts_of(vars(text)) and getattr(text, "base_model_ep_plan", None):
        wanted |= {"ep_size": place.world_size, "enable_expert_parallel": True}
    known = {field.name for field in dataclasses.fields(DistributedConfig)}
    if "ep_size" in known:
        wanted.pop("enable_expert_parallel", None)
    return DistributedConfig(**{name: value for name, value in wanted.items() if name in known})


def from_pretrained(arguments: dict[str, Any], auto: Any) -> tuple[Any, Mapping[str, Any]]:
    """A model loaded by the Auto class, and transformers' report about its checkpoint.

    Nothing is reported of a model whose own code loads its weights, as nomic-embed-text's does.
    """
    # Otherwise the report is a warning with a table, or an error that refers to that table.
    arguments = {**arguments, "output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        found = auto.from_pretrained(**arguments)
    except ValueError as error:
        if "Unrecognized configuration class" in str(error):
            name = auto.__name__
            raise SlurmGPUError(
                f"The model has the type {arguments['config'].model_type}, which {name} of transformers does not know."
                f"{HINTS.get(name, '')}"
            ) from error
        if "tensor parallel size" not in str(error):
            raise
        raise SlurmGPUError(  # transformers 5.20 refuses a vocabulary that does not divide; 5.23 accepts it
            f"This version of transformers cannot split the model over this number of GPUs: {error} Use another number "
            f'of GPUs, or a later transformers; or set processes = "one" in [resources], which spreads the layers.'
        ) from error
    return found if isinstance(found, tuple) else (found, {"missing_keys": (), "mismatched_keys": ()})


def check_whole(model: Any, report: Mapping[str, Any], name: str, advice: str, unused: str = "") -> None:
    """Refuse a model with missing weights in its checkpoint: transformers replaces them by random numbers.

    Tied weights are not missing, nor are those of the module `unused`.
    """
    missing = sorted(each for each in report["missing_keys"] if unused not in each.split(".")[:-1])
    mismatched = [
        f"{name} (stored as {list(stored)}, expected {list(expected)})"
        for name, stored, expected in sorted(report["mismatched_keys"], key=lambda each: str(each[0]))
    ]
    wrongs = [("lacks", missing), ("has in another shape", mismatched)]
    said = [f"{verb} {some_of(names, FEW)}" for verb, names in wrongs if names]
    if said:
        raise SlurmGPUError(
            f"The checkpoint of {name} does not fit a {type(model).__name__}: it {'; it '.join(said)}. Copy or convert "
            f"the checkpoint again; {advice}."
        )


def _context(options: EngineOptions, config: Any) -> int:
    text = config.get_text_config()
    own = getattr(text, "max_position_embeddings", None) or getattr(text, "max_seq_len", None) or sys.maxsize
    return min(int(own), options.max_context or sys.maxsize)


def _kv_bytes(model: Any) -> int:
    """The cache's bytes for a token on the fullest device.

    Measured, since models cache different things, and a process may have only some of the heads.
    """
    import torch

    cache = new_cache(model)
    with torch.inference_mode():
        # Several tokens: a single token would count as decoding.
        ids = torch.zeros(1, 4, dtype=torch.int64, device=model.device)
        model(input_ids=ids, use_cache=True, **{keyword_of(model): cache})
    sizes: Counter[Any] = Counter()
    for layer in cache.layers:
        for each in (getattr(layer, "keys", None), getattr(layer, "values", None)):
            if each is not None and each.numel():
                sizes[each.device] += each.nbytes // each.shape[-2]
    return max(sizes.values(), default=0)


def log_loaded(loaded: Loaded, place: Place, options: EngineOptions, seconds: float) -> None:
    """Log what was loaded, and how long it took."""
    model = loaded.model
    n_parameters = sum(each.numel() for each in model.parameters())
    size = sum(each.numel() * each.element_size() for each in model.parameters())
    log.info(
        "%s: %.3g parameters in %s, %.2f GB on %s%s, loaded in %.1f s; %s attention, context of %d tokens",
        type(model).__name__,
        n_parameters,
        TORCH_NAMES[options.precision],
        size / 1e9,
        place.device if place.gpus < 2 or place.world_size > 1 else f"{place.gpus} GPUs",
        f" (rank {place.rank} of {place.world_size})" if place.world_size > 1 else "",
        seconds,
        getattr(model.config, "_attn_implementation", "its own"),
        loaded.context,
    )
