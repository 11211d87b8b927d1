"""A random Llama with a token for each byte, as the tokenizers of large models have them, and marks of reasoning."""

from pathlib import Path
from typing import Any

THINKING = ("<think>", "</think>")
HARMONY = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>")


def make_byte_tokenizer(folder: Path, marks: tuple[str, ...] = (), template: str | None = None) -> Any:
    """A tokenizer of 256 bytes, an end, and these marks, saved in `folder`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({character: number for number, character in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|return|>"])
    made.add_tokens([AddedToken(mark, special=mark in HARMONY) for mark in marks])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|return|>", pad_token="<|return|>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return tokenizer


def make_byte_llama(folder: Path, marks: tuple[str, ...] = (), template: str | None = None, n_heads: int = 4) -> Path:
    """A random Llama of two layers, in fp32, with such a tokenizer; vLLM takes one of two heads."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_byte_tokenizer(folder, marks, template)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer) + 3,  # as larger models have it, for a round number
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=n_heads,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
