"""LoRA adapters of tiny models, as the library peft writes them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any


def make_adapter(folder: Path, model: Path, seed: int, **changes: Any) -> Path:
    """An adapter with random weights, large enough to change what the model says."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]} | changes
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    get_peft_model(base, LoraConfig(init_lora_weights=False, **settings)).save_pretrained(folder)
    return folder


def write_adapter(folder: Path, model: Path, seed: int, rank: int = 4, alpha: int = 8) -> tuple[Path, Path]:
    """An adapter written without peft, and the whole model that has it in its weights: W + alpha / rank · B A."""
    import torch
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(seed)
    weights = load_file(model / "model.safetensors")
    stored = {}
    for name, weight in list(weights.items()):
        if name.endswith(("q_proj.weight", "v_proj.weight", "down_proj.weight")):
            a = torch.randn(rank, weight.shape[1], generator=generator) * 0.2
            b = torch.randn(weight.shape[0], rank, generator=generator) * 0.2
            layer = f"base_model.model.{name.removesuffix('.weight')}"
            stored |= {f"{layer}.lora_A.weight": a, f"{layer}.lora_B.weight": b}
            weights[name] = weight + alpha / rank * (b @ a)
    folder.mkdir(parents=True)
    save_file(stored, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha, "bias": "none"}
    config |= {"target_modules": ["q_proj", "v_proj", "down_proj"], "base_model_name_or_path": str(model)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    merged = shutil.copytree(model, folder.with_name(f"{folder.name}-merged"))
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
    return folder, merged
