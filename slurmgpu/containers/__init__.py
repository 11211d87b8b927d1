"""Container runtimes and their images: `runtime` has the interface, and finds one by its name.

May import: util, errors. Only the runtime's module knows its options, images and messages.
"""

import os

INSIDE = "/opt/slurmgpu"
"""The folder of slurmgpu and of the workload's packages in the container, for its PYTHONPATH."""
IMAGE = "SLURMGPU_IMAGE"
"""The variable that names the image to a process that slurmgpu starts in one."""


def image_name() -> str | None:
    """The name of the image in which this process runs; None outside of an image."""
    names = (os.environ.get(name) for name in (IMAGE, "APPTAINER_NAME", "SINGULARITY_NAME"))
    return next((name for name in names if name), None)
