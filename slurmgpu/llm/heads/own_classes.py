"""Models with heads that transformers has no class for, and whose own class is code on the hub, which is not run here.

They are Qwen2 with a head of two layers. Qwen's process reward models (Qwen2.5-Math-PRM-7B and -72B) say behind each
step, at the token `<extra_0>`, that it is wrong or right. Its reward model (Qwen2.5-Math-RM-72B) has one number, at the
last token: SGLang's class of it reads that one (python/sglang/srt/models/qwen2_rm.py), and the README of Qwen2.5-Math
gives it a chat in the model's template, without the beginning of another answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PROCESS_REWARD, REWARD = "Qwen2ForProcessRewardModel", "Qwen2ForRewardModel"
"""Their names in config.json."""

STEP_ENDS: Mapping[str, str] = {PROCESS_REWARD: "<extra_0>"}
"""The text behind a step, for the classes that score steps."""


def own_class(name: str) -> Any:
    """The class of such a model, with the methods of an Auto class; None for another."""
    if name not in (PROCESS_REWARD, REWARD):
        return None
    import torch
    from transformers import Qwen2ForSequenceClassification, Qwen2ForTokenClassification

    kind: Any = Qwen2ForTokenClassification if name == PROCESS_REWARD else Qwen2ForSequenceClassification

    class WithTwoLayers(kind):  # type: ignore[misc]  # torch is not followed
        def __init__(self, config: Any) -> None:
            if name == REWARD:
                config.num_labels = 1  # which its config.json does not say
            super().__init__(config)
            width = config.hidden_size
            self.score = torch.nn.Sequential(
                torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, config.num_labels)
            )
            self.post_init()

        @classmethod
        def from_config(cls, config: Any, *, dtype: Any, trust_remote_code: bool = False) -> Any:
            return cls._from_config(config, dtype=dtype)

    WithTwoLayers.__name__ = name
    return WithTwoLayers
