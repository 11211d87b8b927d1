"""Checks of the settings that say what is scored: texts, pairs, chats, or answers in steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_type_hints

from slurmgpu.errors import SlurmGPUError
from slurmgpu.llm.settings import PromptedModelSettings, PromptSettings

TAKEN = (
    *("revision", "model_files", "trust_remote_code", "engine", "precision", "batch_tokens", "max_context", "chat"),
    *("chat_options", "date"),
    *get_type_hints(PromptSettings),
)
"""The model and engine settings that apply to a head."""


def check_settings(settings: PromptedModelSettings) -> None:
    """Refuse engine settings that do not apply to a head."""
    engine = settings.get("engine", "transformers")
    if engine != "transformers":
        raise SlurmGPUError(f"engine is {engine!r}; score only runs with transformers. Remove engine.")
    if "adapter" in settings:
        raise SlurmGPUError(
            "adapter is set, and score does not load adapters. Merge it into its model with peft's merge_and_unload, "
            "and set model to the result."
        )
    for name in settings:
        if name not in (*TAKEN, "engine"):
            raise SlurmGPUError(f"{name} is set, which has no effect in score. Remove it.")


def check_parts(
    prompt: str | None,
    messages: str | None,
    answer: str | None,
    pair: Sequence[str],
    steps: str | None,
    choices: Sequence[str],
) -> None:
    """Refuse settings of what is scored that contradict each other."""
    if pair and len(pair) != 2:
        raise SlurmGPUError(f'pair has {len(pair)} texts; expected two templates, such as ["{{query}}", "{{text}}"].')
    others = {"prompt": prompt, "messages": messages, "answer": answer, "steps": steps}
    if pair and (both := [name for name, value in others.items() if value is not None]):
        raise SlurmGPUError(
            f"pair and {both[0]} are both set; expected either pair, for two texts that belong together, or {both[0]}."
        )
    if answer is not None and steps is not None:
        raise SlurmGPUError("answer and steps are both set; steps are an answer in parts. Remove answer.")
    if choices and steps is None:
        raise SlurmGPUError(
            "choices are the tokens that a model rates each step with, and steps is not set. Set steps. To choose an "
            "answer to a prompt, use the workload classify."
        )
    if len(choices) == 1 or len(set(choices)) < len(choices):
        raise SlurmGPUError(f"choices is {list(choices)}; expected at least two different texts, the good one first.")


def check_pair(pair: Sequence[str], cut: bool, settings: PromptedModelSettings) -> None:
    """Refuse examples before a pair, and two ways to shorten a text."""
    if pair and "fewshot" in settings:
        raise SlurmGPUError("fewshot and pair are both set; examples need a prompt. Remove one of them.")
    if "truncation_side" not in settings:
        return
    if cut:
        raise SlurmGPUError("cut and truncation_side are two ways to shorten a text that is too long. Remove cut.")
    if pair:
        raise SlurmGPUError(
            "truncation_side cuts the longest field of a prompt, and pair is set: only the second text of a pair can "
            "be cut. Set cut = true, and remove truncation_side."
        )


def check_images(pair: Sequence[str], cut: bool, steps: str | None, chat: bool | None) -> None:
    """Refuse inputs that cannot have images: images need a chat."""
    for name, is_set in (("pair", bool(pair)), ("cut", cut), ("steps", steps is not None)):
        if is_set:
            raise SlurmGPUError(f"images and {name} are both set; only a chat takes images here. Remove one of them.")
    if not chat:
        raise SlurmGPUError(
            "images is set, and the input is not a chat: only a chat template has a place for images. Set chat = true, "
            "answer or messages."
        )


def chat_of(
    wanted: bool | None, messages: str | None, answer: str | None, pair: Sequence[str], steps: str | None
) -> tuple[bool | None, str]:
    """Whether inputs go into a chat template (None: if there is one), and the setting that decides it."""
    needs = "messages" if messages is not None else "answer" if answer is not None else None
    if needs is not None:
        if wanted is False:
            raise SlurmGPUError(
                f"chat is false, and {needs} is set, which needs a chat. Remove chat, or put all texts into prompt."
            )
        return True, needs
    if pair:
        if wanted:
            raise SlurmGPUError(
                "chat is true, and pair is set, which is not a chat. Remove chat, or set prompt and answer."
            )
        return False, ""
    if steps is not None:
        return wanted, "steps"
    return bool(wanted), "prompt"
