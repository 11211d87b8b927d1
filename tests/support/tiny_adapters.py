"""LoRA adapters of tiny models, as the library peft writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def make_adapter(folder: Path, model: Path, seed: int, **changes: Any) -> Path:
    """An adapter with random weights, large enough that the model says something else."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]} | changes
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    get_peft_model(base, LoraConfig(init_lora_weights=False, **settings)).save_pretrained(folder)
    return folder
