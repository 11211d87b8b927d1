"""Checks of the settings that say what is scored: texts, pairs, chats, or answers in steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_type_hints

from slurmgpu.errors import SlurmGPUError
from slurmgpu.llm.settings import PromptedModelSettings, PromptSettings

TAKEN = (
    *("revision", "model_files", "trust_remote_code", "engine", "precision", "batch_tokens", "max_context", "chat"),
    "chat_options",
    *get_type_hints(PromptSettings),
)
"""The settings of models and engines that mean something to a head."""


def check_settings(settings: PromptedModelSettings) -> None:
    """Refuse settings of engines that mean nothing to a head."""
    engine = settings.get("engine", "transformers")
    if engine != "transformers":
        raise SlurmGPUError(f"engine is {engine!r}; score computes by transformers alone. Remove engine.")
    if "adapter" in settings:
        raise SlurmGPUError(
            "adapter is set, and score takes none: merge it into its model with peft's merge_and_unload, and set model "
            "to the result."
        )
    for name in settings:
        if name not in (*TAKEN, "engine"):
            raise SlurmGPUError(f"{name} is set, which means nothing to score. Remove it.")


def check_parts(
    prompt: str | None,
    messages: str | None,
    answer: str | None,
    pair: Sequence[str],
    steps: str | None,
    choices: Sequence[str],
) -> None:
    """Refuse settings of what is scored that exclude each other."""
    if pair and len(pair) != 2:
        raise SlurmGPUError(f'pair has {len(pair)} texts; expected two templates, such as ["{{query}}", "{{text}}"].')
    others = {"prompt": prompt, "messages": messages, "answer": answer, "steps": steps}
    if pair and (both := [name for name, value in others.items() if value is not None]):
        raise SlurmGPUError(
            f"pair and {both[0]} are both set; expected pair for two texts that belong together, or the others."
        )
    if answer is not None and steps is not None:
        raise SlurmGPUError("answer and steps are both set; steps are an answer in parts. Remove answer.")
    if choices and steps is None:
        raise SlurmGPUError(
            "choices is what a model says behind each step; set steps. To choose an answer to a prompt use "
            "the workload classify."
        )
    if len(choices) == 1 or len(set(choices)) < len(choices):
        raise SlurmGPUError(f"choices is {list(choices)}; expected at least two different texts, the good one first.")


def check_pair(pair: Sequence[str], cut: bool, settings: PromptedModelSettings) -> None:
    """Refuse examples before a pair, and two ways to shorten a text."""
    if pair and "fewshot" in settings:
        raise SlurmGPUError("fewshot and pair are both set; examples stand before a prompt. Remove one of them.")
    if "truncation_side" not in settings:
        return
    if cut:
        raise SlurmGPUError("cut and truncation_side are two ways to shorten a text that is too long. Remove cut.")
    if pair:
        raise SlurmGPUError(
            "truncation_side cuts the longest field of a prompt, and of a pair the second text is cut. Set cut = true, "
            "and remove truncation_side."
        )


def check_images(pair: Sequence[str], cut: bool, steps: str | None, chat: bool | None) -> None:
    """Refuse what cannot be scored behind images, which only a chat gives their place."""
    for name, is_set in (("pair", bool(pair)), ("cut", cut), ("steps", steps is not None)):
        if is_set:
            raise SlurmGPUError(f"images is set, and so is {name}; a chat alone has images here. Remove one of them.")
    if not chat:
        raise SlurmGPUError(
            "images is set, and only a chat gives images their place. Set chat = true, or answer or messages."
        )


def chat_of(
    wanted: bool | None, messages: str | None, answer: str | None, pair: Sequence[str], steps: str | None
) -> tuple[bool | None, str]:
    """Whether inputs go into a chat template, and the setting that says so; None: if there is a template."""
    needs = "messages" if messages is not None else "answer" if answer is not None else None
    if needs is not None:
        if wanted is False:
            raise SlurmGPUError(
                f"chat is false, and {needs} is set, which is a chat. Remove chat, or put all texts into prompt."
            )
        return True, needs
    if pair:
        if wanted:
            raise SlurmGPUError(
                "chat is true, and pair is set, which is no chat. Remove chat, or set prompt and answer."
            )
        return False, ""
    if steps is not None:
        return wanted, "steps"
    return bool(wanted), "prompt"
