"""Follow the structures of answers token by token with llguidance, to find which tokens may come next in each row."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from slurmgpu.errors import SlurmGPUError
from slurmgpu.llm.prompts.codec import Codec
from slurmgpu.llm.prompts.encoded import Encoded
from slurmgpu.llm.prompts.structures import lark_of, library

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

MOST_THREADS = 8
"""Threads that compute masks; one needs some 50 µs for a row."""


class Matcher:
    """The position of one answer in its grammar."""

    def __init__(self, matcher: Any, ends: Collection[int]) -> None:
        self.llguidance = matcher
        self._ends = ends

    def take(self, token: int) -> None:
        """Advance by a token of the answer."""
        if token not in self._ends:
            self.llguidance.consume_token(token)

    @property
    def error(self) -> str | None:
        """Why the grammar cannot be followed further, such as a limit of the library; None if it can."""
        said = self.llguidance.get_error()
        return f"its structure cannot be followed further; llguidance says: {said.splitlines()[0]}" if said else None


class Grammars:
    """The grammars of one model's answers. A token of `ends` ends an answer; logits have `width` tokens."""

    def __init__(self, tokenizer: Any, codec: Codec, ends: Collection[int], width: int) -> None:
        self._tokenizer = tokenizer
        self._codec = codec
        self._ends = frozenset(ends)
        self.width = width
        self._made: Any = None
        self._executor: Any = None
        self._known: dict[str, Any] = {}

    def grammar_of(self, encoded: Encoded) -> str | None:
        """The grammar of everything that the model generates for a request; None if the request has no structure."""
        structure = encoded.request.sampling.structure
        return None if structure is None else lark_of(structure, self._codec.decoder.reasoning_of(encoded), self._ends)

    def start(self, encoded: Encoded) -> Matcher | None:
        """A matcher at the beginning of a request's answer; None if the request has no structure."""
        grammar = self.grammar_of(encoded)
        return None if grammar is None else self.follow(grammar)

    def follow(self, grammar: str) -> Matcher:
        """A matcher at the beginning of a grammar; SlurmGPUError if llguidance cannot use it or the tokenizer."""
        if grammar not in self._known:
            self._known[grammar] = self._compile(grammar)
        return Matcher(self._known[grammar].deep_copy(), self._ends)

    def packed(self, matchers: Sequence[Matcher | None]) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
        """The bits of the tokens that may come next, the first in the lowest bit: (row, byte); None if all may."""
        rows = [(matcher.llguidance, row) for row, matcher in enumerate(matchers) if matcher is not None]
        if not rows:
            return None
        from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

        found = allocate_token_bitmask(len(matchers), self._made.vocab_size)
        fill_next_token_bitmask_par(self._executor, rows, found)
        return found.view(np.uint8)

    def allowed(self, matchers: Sequence[Matcher | None], device: Any) -> Tensor | None:
        """Whether each token may come next: bool (row, token), on the device; None if all may."""
        import torch

        packed = self.packed(matchers)
        if packed is None:
            return None
        if device.type == "cpu":  # 0.3 ms for 64 rows of 32,000 tokens, where PyTorch takes 3.5 ms
            bits = np.unpackbits(packed, axis=1, count=self.width, bitorder="little")
            return torch.from_numpy(bits.view(np.bool_))
        return unpack(torch.from_numpy(packed).to(device), self.width)

    def along(self, encoded: Encoded, tokens: Sequence[int], device: Any) -> Tensor | None:
        """Whether each token may come at each place of an answer: bool (place, token); None if all may."""
        import torch

        matcher = self.start(encoded)
        if matcher is None:
            return None
        rows = []
        for token in tokens:
            rows.append(self.allowed([matcher], device))
            matcher.take(token)
        return torch.cat(rows)

    @property
    def n_bytes(self) -> int:
        """The bytes of a row of `packed`."""
        return -(-self._n_tokens // 32) * 4

    @property
    def _n_tokens(self) -> int:
        return max(self.width, len(self._tokenizer))

    def _compile(self, lark: str) -> Any:
        llguidance = library()
        if self._made is None:
            self._made = self._make_tokenizer()
            n_cpus = len(os.sched_getaffinity(0))
            self._executor = llguidance.LLExecutor(num_threads=max(1, min(MOST_THREADS, n_cpus)))
        found = llguidance.LLMatcher(self._made, lark, log_level=0)
        if said := found.get_error():
            raise SlurmGPUError(f"This model's answers cannot be constrained to the structure; llguidance says: {said}")
        return found

    def _make_tokenizer(self) -> Any:
        """The tokenizer for llguidance, which knows the bytes of each token."""
        if not self._ends:
            raise SlurmGPUError(
                "The model has no token that ends an answer (eos_token_id), so structured answers would never end. "
                "Add eos_token_id to the model's generation_config.json."
            )
        llguidance = library()
        from llguidance.hf import from_tokenizer

        ends = sorted(self._ends)
        try:
            return from_tokenizer(self._tokenizer, n_vocab=self._n_tokens, eos_token=ends)
        except ValueError as error:
            log.info("llguidance cannot read the tokenizer (%s), so it gets the text of each token", error)
            decoded = _Decoded(self._tokenizer, self._n_tokens, ends)
            return llguidance.LLTokenizer(llguidance.TokenizerWrapper(decoded), eos_token=ends)


class _Decoded:
    """A tokenizer given by the text of each token, without tokens that are parts of characters."""

    def __init__(self, tokenizer: Any, n_tokens: int, ends: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = ends[0], tokenizer.bos_token_id
        self.special_token_ids = sorted({*tokenizer.all_special_ids, *ends})
        # After another token, since some tokenizers drop the blank before the first token.
        first = self("0")
        n_before = len(tokenizer.decode(first))
        known = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        texts = [tokenizer.decode([*first, number])[n_before:] for number in range(len(known))]
        for number in self.special_token_ids:
            texts[number] = known[number]
        self.tokens = [text.encode() for text in texts] + [b""] * (n_tokens - len(known))

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("expected a text")  # tells llguidance not to pass bytes
        found: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return found


def unpack(packed: Tensor, width: int) -> Tensor:
    """The bits of bytes as bool: (row, token)."""
    import torch

    bits = torch.arange(8, device=packed.device, dtype=torch.uint8)
    return ((packed[:, :, None] >> bits) & 1).flatten(1)[:, :width].bool()
