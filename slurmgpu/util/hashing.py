"""A digest of a file, by which one sees that it has changed; of a large file by samples of it."""

from __future__ import annotations

import hashlib
from pathlib import Path

WHOLE_BYTES = 64 << 20
"""A file up to this is read whole; of a larger one these many samples, spread evenly from its first byte to its last.

A training step changes every matrix, so that samples tell it; reading hundreds of gigabytes would take each task
minutes.
"""
DIGITS = 16
"""The digits of a digest that names code."""
N_SAMPLES = 64
SAMPLE_BYTES = 64 << 10


def digest_of(path: Path) -> str:
    """A digest of a file's size and content; of a large file's content samples."""
    size = path.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=12)
    with open(path, "rb") as file:
        if size <= WHOLE_BYTES:
            digest.update(file.read())
        else:
            if path.suffix == ".safetensors":  # the names and shapes, as in sizes.py
                digest.update(file.read(min(int.from_bytes(file.read(8), "little"), WHOLE_BYTES)))
            for number in range(N_SAMPLES):
                file.seek(number * (size - SAMPLE_BYTES) // (N_SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
