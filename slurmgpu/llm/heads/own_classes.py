"""Models with heads that transformers has no class for, and whose own class is code on the hub, which is not run here.

Qwen's process reward models (Qwen2.5-Math-PRM-7B and -72B) are Qwen2 with a head of two layers, which says behind each
step, at the token `<extra_0>`, that it is wrong or right.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PROCESS_REWARD = "Qwen2ForProcessRewardModel"

STEP_ENDS: Mapping[str, str] = {PROCESS_REWARD: "<extra_0>"}
"""Their names in config.json, and what stands behind a step."""


def own_class(name: str) -> Any:
    """The class of a model in `STEP_ENDS`, with the methods of an Auto class; None for another."""
    if name not in STEP_ENDS:
        return None
    import torch
    from transformers import Qwen2ForTokenClassification

    class Qwen2ForProcessRewardModel(Qwen2ForTokenClassification):  # type: ignore[misc]  # torch is not followed
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            width = config.hidden_size
            self.score = torch.nn.Sequential(
                torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, config.num_labels)
            )
            self.post_init()

        @classmethod
        def from_config(cls, config: Any, *, dtype: Any, trust_remote_code: bool = False) -> Any:
            return cls._from_config(config, dtype=dtype)

    return Qwen2ForProcessRewardModel
