"""Memory of a model on GPUs: what is on each when it is split, spread, or whole; and how much of a GPU can be used."""

from __future__ import annotations

from dataclasses import dataclass

USABLE = 0.92
RUNTIME_BYTES = 1.5e9
"""Of a GPU's memory, what is left to weights and cache: the CUDA context, its libraries and fragments take the rest."""


@dataclass(frozen=True)
class Memory:
    """What a model needs, in bytes: weights that can be split over GPUs, weights that cannot, and the batch's cache.

    The cache has as many parts as there are key-value heads; more GPUs than those hold some of them twice.
    """

    split: float
    whole: float
    cache: float
    layers: int
    cache_parts: int = 1_000

    @property
    def weights(self) -> float:
        """Bytes of all weights."""
        return self.split + self.whole

    def on_each(self, n_gpus: int, *, tensor_parallel: bool) -> tuple[float, float]:
        """Weights and cache on the fullest of `n_gpus`."""
        if n_gpus == 1:
            return self.weights, self.cache
        if tensor_parallel:
            return self.split / n_gpus + self.whole, self.cache / min(n_gpus, self.cache_parts)
        # Layers are not cut: one GPU has one more than its share.
        layers = min(1.0, 1 / n_gpus + 1 / max(1, self.layers))
        return self.weights * layers, self.cache * layers

    def fits(self, n_gpus: int, gpu_memory: float, *, tensor_parallel: bool) -> bool:
        """Whether so many GPUs have room for it."""
        return sum(self.on_each(n_gpus, tensor_parallel=tensor_parallel)) <= usable(gpu_memory)


def usable(gpu_memory: float) -> float:
    """Bytes of a GPU that weights and cache may fill."""
    return max(0.0, USABLE * gpu_memory - RUNTIME_BYTES)
