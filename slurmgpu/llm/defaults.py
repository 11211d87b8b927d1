"""What a config.json leaves out because it is the default of its kind of model, as those inside others often do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAMES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window", "every", "tie_word_embeddings"),
)

_TABLE = """
    cohere      256000 8192 22528 40 64  -   -   8192    - - 1
    cohere2     256000 8192 22528 40 64  -   -   8192 4096 4 1
    gemma       256000 3072 24576 28 16 16 256   8192    - - 1
    gemma2      256000 2304  9216 26  8  4 256   8192 4096 2 1
    gemma3_text 262208 2304  9216 26  8  4 256 131072 4096 6 1
    glm         151552 4096 13696 40 32  2 128 131072    - - 0
    glm4        151552 4096 13696 40 32  2 128 131072    - - 0
    granite      32000 4096 11008 32 32  -   -   2048    - - 0
    llama        32000 4096 11008 32 32  -   -   2048    - - 0
    ministral    32000 4096 14336 32 32  8   - 131072 4096 - 0
    ministral3  131072 4096 14336 34 32  8 128 262144    - - 0
    mistral      32000 4096 14336 32 32  8   - 131072 4096 - 0
    mixtral      32000 4096 14336 32 32  8   - 131072    - - 0
    olmo2        50304 4096 11008 32 32  -   -   2048    - - 0
    phi          51200 2048  8192 24 32  -   -   2048    - - 0
    phi3         32064 3072  8192 32 32  -   -   4096    - - 0
    qwen2       151936 4096 22016 32 32 32   -  32768    - - 0
    qwen3       151936 4096 22016 32 32 32 128  32768    - - 0
"""

DEFAULTS: Mapping[str, Mapping[str, int]] = {
    kind: {name: int(value) for name, value in zip(NAMES, values, strict=True) if value != "-"}
    for kind, *values in map(str.split, _TABLE.strip().splitlines())
}
"""By model type, as in transformers 5.23; a test compares them. `every`: of so many layers one keeps all tokens."""


def with_defaults(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A text config with what its kind of model takes for granted; what the config says itself, null too, goes first.

    Where only some layers keep all tokens `layer_types` says so.
    """
    defaults = DEFAULTS.get(str(config.get("model_type")), {})
    found = {**defaults, **config}
    every = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or defaults.get("every")
    if every and "every" in defaults and not found.get("layer_types"):
        n_layers = int(found["num_hidden_layers"])
        found["layer_types"] = [
            "full_attention" if layer % int(every) == 0 else "sliding_attention" for layer in range(1, n_layers + 1)
        ]
    return found
