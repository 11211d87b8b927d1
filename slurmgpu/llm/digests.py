"""Whether a model's folder still holds what it held when a run was planned, by a digest of each file that matters."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from slurmgpu.errors import SlurmGPUError
from slurmgpu.llm.models import PACKAGE, ModelSource
from slurmgpu.util.hashing import digest_of

MATTERS = (
    *("config.json", "generation_config.json", "tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template*", "preprocessor_config.json", "*.py"),
    *("*.safetensors", "*.index.json", "pytorch_model*", "adapter_*"),
)
"""What `from_pretrained` reads; notes, plots and what a training leaves beside it may come and go."""

N_READERS = 8


def digests_of(source: ModelSource) -> dict[str, str] | None:
    """A digest of each file in a model's folder that loading reads; None where a name pins the content already.

    Of the hub that is a commit, of a package its version. Times are left out: a copy of the folder is as good.
    """
    if source.repository is not None or source.name.startswith(PACKAGE):
        return None
    paths = sorted({path for pattern in MATTERS for path in source.folder.glob(pattern) if path.is_file()})
    with ThreadPoolExecutor(N_READERS) as readers:
        return {path.name: digest for path, digest in zip(paths, readers.map(digest_of, paths), strict=True)}


def check_unchanged(source: ModelSource, planned: Mapping[str, str]) -> None:
    """SlurmGPUError that names what has changed since the digests were taken."""
    found = digests_of(source) or {}
    changes = {
        "changed": [name for name in planned if name in found and found[name] != planned[name]],
        "missing": [name for name in planned if name not in found],
        "new": [name for name in found if name not in planned],
    }
    if any(changes.values()):
        said = "; ".join(
            f"{_some(names)} {'is' if len(names) == 1 else 'are'} {how}" for how, names in changes.items() if names
        )
        raise SlurmGPUError(
            f"the model in {source.folder} is not the one that this run was planned with: {said}. Rows of two models "
            f"would be mixed. Put the former files back and resubmit, or plan a new run, in another run directory, "
            f"with the model as it is now."
        )


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} other{'s' if len(names) > 2 else ''}"
