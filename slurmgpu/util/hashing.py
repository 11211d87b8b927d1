"""A digest of a file, to notice that it has changed; a large file is sampled."""

from __future__ import annotations

import hashlib
from pathlib import Path

WHOLE_BYTES = 64 << 20
"""Files up to this size are read whole; larger ones by samples, spread evenly over the file.

A training step changes every matrix, so samples show it; reading hundreds of gigabytes would take minutes.
"""
N_SAMPLES = 64
SAMPLE_BYTES = 64 << 10


def digest_of(path: Path) -> str:
    """A digest of a file's size and content, or of samples of a large file's content."""
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
