"""Classes for heads that transformers lacks; the models' own classes are code on the hub, which is not run here.

They are Qwen2 with a head of two layers. Qwen's process reward models (Qwen2.5-Math-PRM-7B and -72B) classify each step
as wrong or right at the token `<extra_0>` after it. Its reward model (Qwen2.5-Math-RM-72B) has one number, at the last
token: SGLang's class reads it there (python/sglang/srt/models/qwen2_rm.py), and the README of Qwen2.5-Math gives the
model a chat in its template, without the beginning of another answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PROCESS_REWARD, REWARD = "Qwen2ForProcessRewardModel", "Qwen2ForRewardModel"
"""Their names in config.json."""

STEP_ENDS: Mapping[str, str] = {PROCESS_REWARD: "<extra_0>"}
"""The text after a step, for the classes that score steps."""


def own_class(name: str) -> Any:
    """The class of such a model, with the methods of an Auto class; None for any other name."""
    if name not in (PROCESS_REWARD, REWARD):
        return None
    import torch
    from transformers import Qwen2ForSequenceClassification, Qwen2ForTokenClassification

    kind: Any = Qwen2ForTokenClassification if name == PROCESS_REWARD else Qwen2ForSequenceClassification

    class WithTwoLayers(kind):
        def __init__(self, config: Any) -> None:
            if name == REWARD:
                config.num_labels = 1  # missing in its config.json
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
