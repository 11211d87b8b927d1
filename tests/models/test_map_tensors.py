"""Functions that capture PyTorch's tensors and models."""

import pytest
import torch

from slurmgpu import SlurmGPUError
from slurmgpu.code import functions


def by_value(function):
    function.__module__ = "__main__"
    return function


def test_tensors_that_are_not_on_the_cpu_are_refused_by_the_name_of_their_variable(tmp_path):
    weights = torch.ones(3, device="meta")  # as on a GPU: another process cannot have them
    model = torch.nn.Linear(2, 2, device="meta")
    for function, name in [(by_value(lambda item: weights), "weights"), (by_value(lambda item: model(item)), "model")]:
        with pytest.raises(SlurmGPUError, match=rf"the variable '{name}' is a tensor on meta\. Make it in `load`"):
            functions.pack({"function": function, "load": None}, tmp_path)


def test_tensors_on_the_cpu_travel(tmp_path):
    weights = torch.arange(3)
    packed = functions.pack({"function": by_value(lambda item: int(weights[item])), "load": None}, tmp_path)
    (tmp_path / functions.PICKLE).write_bytes(packed.content)
    assert functions.unpack(tmp_path / functions.PICKLE, packed.record)["function"](2) == 2
