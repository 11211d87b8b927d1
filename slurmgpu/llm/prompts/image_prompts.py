"""Prompts with images for models in transformers: the model's processor makes tokens and tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.llm.interface.engine import EngineOptions, Prompt, Request
from slurmgpu.llm.prompts.codec import Codec
from slurmgpu.llm.prompts.encoded import Encoded, PromptError
from slurmgpu.llm.prompts.images import check_pillow, open_image

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

N_READERS, N_AHEAD = 4, 8
"""The number of threads that open images, and of prompts with images opened ahead of the model's processor."""

REFUSES = (ValueError, ZeroDivisionError, IndexError)
"""Processors' errors for image sizes that they do not take, such as an aspect ratio above 200."""

MOST_BYTES = 1 << 30
"""The most bytes of prompt tensors that are held before their answers are computed: a photo may have 300 MB."""

T = TypeVar("T")


@dataclass(frozen=True)
class Shown:
    """The tokens of a prompt, including its images' tokens, and the model's other inputs.

    `images` are tensors for the images only; `types` have a value for each token: (1, token).
    """

    tokens: tuple[int, ...]
    images: Mapping[str, Tensor] = field(default_factory=dict)
    types: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def n_bytes(self) -> int:
        """The size of the tensors."""
        return sum(each.nbytes for each in (*self.images.values(), *self.types.values()))


@dataclass(frozen=True)
class ShownRequest:
    """A request with the model's inputs."""

    encoded: Encoded
    shown: Shown


def load_processor(options: EngineOptions) -> Any:
    """The model's processor with its tokenizer and chat template; SlurmGPUError if one is missing."""
    check_pillow()
    from transformers import AutoProcessor

    name = options.model.name
    try:
        found = AutoProcessor.from_pretrained(
            str(options.model.folder), revision=options.model.revision, trust_remote_code=options.trust_remote_code
        )
    except ImportError as error:
        raise SlurmGPUError(
            f"The image processor of {name} needs a package that is missing: {' '.join(str(error).split())[:300]} "
            "Install Pillow, torchvision and num2words with pip install 'slurmgpu[images]'."
        ) from error
    if image_token(found) is None:
        raise SlurmGPUError(
            f"The processor of {name}, {type(found).__name__}, has no image token, and the engine transformers needs "
            'one. Choose another model, or engine = "vllm".'
        )
    found.tokenizer.chat_template = getattr(found, "chat_template", None) or found.tokenizer.chat_template
    if not found.tokenizer.chat_template:
        raise SlurmGPUError(
            f"{name} has no chat template, which is needed to place images in a prompt. Copy chat_template.jinja from "
            "its base model, or choose an instruction-tuned model."
        )
    found.tokenizer.padding_side = "left"
    return found


def image_token(processor: Any) -> str | None:
    """The text that stands for an image in a prompt."""
    found = getattr(processor, "image_token", None)
    return found if isinstance(found, str) else None


def marks_of(processor: Any) -> frozenset[str]:
    """The texts that the processor treats as images and other media."""
    return frozenset(
        value for name, value in vars(processor).items() if name.endswith("_token") and isinstance(value, str) and value
    )


def moved(tensors: Mapping[str, Tensor], dtype: Any, device: Any) -> dict[str, Tensor]:
    """The tensors on the device, pixels in the model's dtype."""
    return {
        name: each.to(device, dtype) if each.is_floating_point() else each.to(device) for name, each in tensors.items()
    }


def in_groups(shown: Iterable[tuple[T, Shown | PromptError]]) -> Iterator[list[tuple[T, Shown | PromptError]]]:
    """The pairs in order, in groups whose tensors take MOST_BYTES plus the last prompt's."""
    group: list[tuple[T, Shown | PromptError]] = []
    held = 0
    for pair in shown:
        group.append(pair)
        held += 0 if isinstance(pair[1], PromptError) else pair[1].n_bytes
        if held >= MOST_BYTES:
            yield group
            group, held = [], 0
    if group:
        yield group


def _open(prompt: Prompt) -> list[Image]:
    return [open_image(source) for source in prompt.images]


class ImagePrompts:
    """Encodes requests whose prompts may have images."""

    def __init__(self, processor: Any, codec: Codec) -> None:
        self._processor = processor
        self._codec = codec
        self._token = image_token(processor) or ""

    def encode(self, requests: Sequence[Request]) -> Iterator[list[tuple[Request, ShownRequest | PromptError]]]:
        """Each request's tokens and tensors, or its error, in groups; requests with the same prompt share them."""
        alike: dict[int, list[Request]] = {}
        for request in requests:  # an item's samples have the same prompt
            alike.setdefault(id(request.prompt), []).append(request)
        every = self.show([some[0].prompt for some in alike.values()])
        for group in in_groups(zip(alike.values(), every, strict=True)):
            yield [(request, self._fit(request, shown)) for some, shown in group for request in some]

    def _fit(self, request: Request, shown: Shown | PromptError) -> ShownRequest | PromptError:
        if isinstance(shown, PromptError):
            return shown
        try:
            return ShownRequest(self._codec.fit(request, shown.tokens), shown)
        except PromptError as error:
            return error

    def show(self, prompts: Sequence[Prompt], *, answers_at_once: bool = False) -> Iterator[Shown | PromptError]:
        """The model's inputs for each prompt, in order, or the prompt's error.

        Threads open images ahead. For `answers_at_once` see `Codec.render`.
        """
        with ThreadPoolExecutor(N_READERS) as readers:
            opened: deque[Future[list[Image]]] = deque()
            rest = iter(prompts)
            for prompt in prompts:
                opened.extend(readers.submit(_open, each) for each in islice(rest, N_AHEAD + 1 - len(opened)))
                try:
                    images = opened.popleft().result()
                    text, _ = self._codec.render(prompt, answers_at_once=answers_at_once)
                    yield self.read(self._codec.parts(text), images)
                except ItemError as error:
                    yield PromptError(str(error))
                except PromptError as error:
                    yield error

    def read(self, parts: Sequence[str], images: Sequence[Any]) -> Shown:
        """The model's inputs for the texts between marks; one text has the places of all images."""
        import torch

        n_places = [part.count(self._token) for part in parts]
        at = max(range(len(parts)), key=n_places.__getitem__)
        if n_places[at] != sum(n_places) or n_places[at] != len(images):
            raise PromptError(
                f"the chat template has {sum(n_places)} places ({self._token}) for {len(images)} images; expected a "
                f"chat template that takes images as parts of a message's content, and no {self._token} in the prompt"
            )
        try:
            found = self._processor(text=[parts[at]], images=[*images], add_special_tokens=False, return_tensors="pt")
        except REFUSES as error:
            raise PromptError(f"the model's image processor rejects the images: {error}") from error
        vocabulary = self._codec.vocabulary
        before, after = [*vocabulary.pieces(parts[:at])], [*vocabulary.pieces(parts[at + 1 :], goes_on=True)]
        ids = found["input_ids"]
        tensors = {name: each for name, each in found.items() if name not in ("input_ids", "attention_mask")}
        if wrong := [name for name, each in tensors.items() if not isinstance(each, torch.Tensor) or not each.dim()]:
            raise SlurmGPUError(
                f"{type(self._processor).__name__} returns {wrong[0]!r}, which the engine transformers cannot batch. "
                'Choose another model, or engine = "vllm".'
            )
        types = {
            name: torch.nn.functional.pad(each, (len(before), len(after)))
            for name, each in tensors.items()
            if each.shape == ids.shape
        }
        rest = {name: each for name, each in tensors.items() if name not in types}
        return Shown((*before, *ids[0].tolist(), *after), rest, types)
