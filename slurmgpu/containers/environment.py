"""The environment of a process in the image. No value is ever an argument, which `ps` would show."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Mapping
from pathlib import Path

from slurmgpu.containers.settings import NAME, Container, ContainerError

ALLOWED = (
    *("SLURM_*", "SLURMGPU_*", "SUBMITIT_*"),
    *("CUDA_*", "NVIDIA_*", "ROCR_*", "HIP_*", "ZE_*"),
    *("NCCL_*", "GLOO_*", "UCX_*", "FI_*", "OMPI_*", "PMI*", "MASTER_*", "RANK", "WORLD_SIZE", "LOCAL_*"),
    *("OMP_*", "MKL_*", "OPENBLAS_*"),
    *("HF_*", "TRANSFORMERS_*", "TOKENIZERS_*", "TORCH_*", "PYTORCH_*", "TRITON_*", "VLLM_*", "JAX_*", "XLA_*"),
    *("WANDB_*", "*_PROXY", "*_proxy", "XDG_CACHE_HOME", "TMPDIR", "TZ", "TERM"),
)
"""The variables of the task that are set inside. docs/explanation/containers.md says why not all."""

INSTALLATIONS = re.compile(r"(CUDA|NVIDIA|NCCL|UCX|OMPI|ROCR|HIP|MKL|OPENBLAS)_(HOME|ROOT|PATH|DIR|BASE|PREFIX)\Z")
"""Paths of libraries that modules of the host installed: the image has its own."""

ALWAYS = {"PYTHONNOUSERSITE": "1", "PYTHONUNBUFFERED": "1", "LANG": "C.UTF-8"}

CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "MPLCONFIGDIR": "matplotlib",
    "NUMBA_CACHE_DIR": "numba",
}
"""Caches of compiled code, which tasks must not share on a network file system, and their folders."""

FOLDERS = (
    *("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "TORCH_HOME", "WANDB_DIR", "XDG_CACHE_HOME"),
    *("TMPDIR", "SLURM_TMPDIR"),
)
"""Variables that name folders of the host, which are bound."""


def inner_environment(
    container: Container, environ: Mapping[str, str], own: Mapping[str, str], scratch: Path
) -> dict[str, str]:
    """The variables of a process in the image: allowed ones of the task, overridden by the user's, then by `own`."""
    inside = {name: value for name, value in environ.items() if _allowed(name)}
    inside |= ALWAYS
    inside |= {name: str(scratch / "caches" / folder) for name, folder in CACHES.items()}
    if container.home == "none":  # then there is no ~/.cache
        inside.setdefault("XDG_CACHE_HOME", str(scratch / "caches"))
    for name, value in container.env.items():
        if value is True:
            if name not in environ:
                raise ContainerError(
                    f"[container] env passes on {name}, which is not set in this task's environment. "
                    f"Set it where you call `slurmgpu submit`, or in [slurm] setup"
                )
            inside[name] = environ[name]
        elif value is False:
            inside.pop(name, None)
        else:
            inside[name] = value
    given = inside.get("PYTHONPATH")
    inside |= own
    if given and "PYTHONPATH" in own:
        inside["PYTHONPATH"] = os.pathsep.join((own["PYTHONPATH"], given))
    return inside


def _allowed(name: str) -> bool:
    # With one name that no shell takes the runtime drops all variables, with exit code 0.
    if not NAME.match(name) or INSTALLATIONS.match(name):
        return False
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in ALLOWED)
