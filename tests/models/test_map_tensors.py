"""Functions that capture PyTorch's tensors and models."""

import pytest
import torch

from slurmgpu import SlurmGPUError
from slurmgpu.code import functions
from slurmgpu.code.pickling import of_cpu
from slurmgpu.code.value_digest import digest_of


def by_value(function):
    function.__module__ = "__main__"
    return function


def test_tensors_that_are_not_on_the_cpu_are_refused_by_the_name_of_their_variable(tmp_path):
    weights = torch.ones(3, device="meta")  # as on a GPU: another process cannot have them
    model = torch.nn.Linear(2, 2, device="meta")
    for function, name in [(by_value(lambda item: weights), "weights"), (by_value(lambda item: model(item)), "model")]:
        with pytest.raises(SlurmGPUError, match=rf"the variable '{name}' is a tensor on meta\. Create it in `load`"):
            functions.pack({"function": function, "load": None}, tmp_path)


def test_tensors_on_the_cpu_travel(tmp_path):
    weights = torch.arange(3)
    packed = functions.pack({"function": by_value(lambda item: int(weights[item])), "load": None}, tmp_path)
    (tmp_path / functions.PICKLE).write_bytes(packed.content)
    assert functions.unpack(tmp_path / functions.PICKLE, packed.record)["function"](2) == 2


def test_devices_that_are_the_cpu_are_found_by_their_variables():
    here, there, text, ones = torch.device("cpu"), torch.device("cuda:1"), "cpu", torch.ones(1)
    assert sorted(of_cpu(by_value(lambda item: (here, there, text, ones)))) == ["here", "text"]


def test_a_tensor_is_known_by_its_content():
    """PyTorch pickles the address of its storage, which no other process has."""
    ones = [torch.nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16)) for _ in range(2)]
    assert digest_of(ones[0]) == digest_of(ones[1])
    different = [ones[0], torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(3, 2), torch.zeros(2, 3), torch.tensor(1)]
    assert len({digest_of(each) for each in different}) == len(different)
    conjugate = torch.tensor([1 + 2j]).conj()
    assert digest_of(conjugate) == digest_of(conjugate.resolve_conj()) != digest_of(conjugate.conj())
