"""A pretended CUDA device: to Python its tensors are on `cuda:0`, and their data lie on the CPU.

It raises where CUDA does (tensors of two devices in one call, NumPy, indices and generators of another device, waiting
in a capture), counts what waits for the device, leaves copies that do not wait undone until something waits, and
captures calls in graphs, which a replay does again in the same memory.

It sees calls of PyTorch's Python interface, not what these call in C++, nor what a backward pass does.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch
from torch._functorch import eager_transforms, vmap
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

CARD, CPU = torch.device("cuda", 0), torch.device("cpu")
FREE = {"__get__", "__set__", "__getitem__", "__setitem__", "copy_", "index_put_", "tensor", "as_tensor", "new_tensor"}
FREE |= {"_has_compatible_shallow_copy_type", "set_"}
"""Calls that may have tensors of both devices."""
WAIT = {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__format__", "equal", "allclose"}
WAIT |= {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount"}
MEMORY = 1 << 36


def on_card(tensor: Any) -> bool:
    """Whether a tensor is on the card."""
    return getattr(tensor, "_is_on_card", False)


def is_on_cpu(tensor: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        return not on_card(tensor) and tensor.device.type == "cpu"


def put(found: Any, *, there: bool = True) -> Any:
    """The tensors in `found`, on the card or not."""
    for each in tree_leaves(found):
        if isinstance(each, torch.Tensor) and (on_card(each) or is_on_cpu(each)):
            each._is_on_card = there
    return found


class Card(TorchFunctionMode):
    """The device, within a `with`; `waits` counts the waits for it by what caused them."""

    def __init__(self, shared: Any = None) -> None:
        super().__init__()
        self._state = shared or SimpleNamespace(waits=Counter(), undone=[], calls=None, mode="default", stream=None)

    @property
    def waits(self) -> Counter[str]:
        return self._state.waits

    @property
    def n_ends(self) -> int:
        """How often something waited for all of the device's work; an upload waits only for itself."""
        return self.waits.total() - self.waits["upload"]

    def wait(self, what: str, *, is_over: bool = True) -> None:
        """Count a wait, which may have waited for all of the device's work."""
        if self._state.calls is not None:
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing: {what}")
        if self._state.mode == "error":
            raise RuntimeError(f"called a synchronizing CUDA operation: {what}")
        self.waits[what] += 1
        if is_over:
            with torch._C.DisableTorchFunction(), torch.inference_mode():
                while self._state.undone:
                    target, value = self._state.undone.pop(0)
                    target.copy_(value)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        first, there = next(iter(args), None), [each for each in tensors if on_card(each)]
        if name == "__get__" and there:
            known = {"device": CARD, "is_cuda": True, "is_cpu": False}
            if func.__self__.__name__ in known:
                return known[func.__self__.__name__]
        if name == "get_device" and there:
            return 0
        if name in ("to", "cpu", "cuda"):
            return self._moved(func, name, args, kwargs)
        if name in ("numpy", "__array__") and there:
            raise TypeError("can't convert cuda:0 device type tensor to numpy.")
        if name == "pin_memory" or kwargs.pop("pin_memory", False):
            made = first.clone() if name == "pin_memory" else func(*args, **kwargs)
            made._is_pinned = True
            return made
        target = kwargs.get("device")
        if target is not None and torch.device(target).type == "cuda":
            kwargs["device"] = CPU
            if isinstance(kwargs.get("generator"), torch.Generator):
                raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
        if there and name not in FREE and any(is_on_cpu(each) and (each.ndim or name == "cat") for each in tensors):
            shapes = [(*each.shape, str(CARD if on_card(each) else CPU)) for each in tensors]
            raise RuntimeError(f"Expected all tensors to be on the same device: {name} of {shapes}")
        if name == "copy_" and self._copies_later(*args, **kwargs):
            return first
        if name in ("__getitem__", "__setitem__", "index_put_"):
            self._index(*args, is_read=name == "__getitem__")
        if there and (name in WAIT or (name == "where" and len(args) == 1)):
            self.wait(name)
        goes_there = torch.device(target).type == "cuda" if target is not None else bool(there)
        if name == "tensor" and target is None and first is not None:
            goes_there = on_card(first)  # numbers of a list are read
        if goes_there and (name == "new_tensor" or (name in ("tensor", "as_tensor") and not there)):
            self.wait("upload", is_over=False)
        sums = kwargs.pop("out_dtype", None) if there and name == "mm" else None  # the CPU has no such product
        found = func(*args, **kwargs) if sums is None else func(*(each.to(sums) for each in args))
        if name == "__set__" and func.__self__.__name__ == "data":
            put(first, there=on_card(args[1]))
        elif goes_there and name != "__setitem__":
            put(found)
        self._capture(func, args, kwargs, found, is_kept=name == "__setitem__")
        return found

    def _capture(self, func: Any, args: Any, kwargs: Any, found: Any, *, is_kept: bool = False) -> None:
        if self._state.calls is not None and (is_kept or isinstance(found, torch.Tensor | tuple | list)):
            self._state.calls.append((func, args, kwargs, found))

    def _moved(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        first, *rest = args
        target = {"cpu": CPU, "cuda": CARD}.get(name, kwargs.pop("device", None))
        if name == "to" and rest and not isinstance(rest[0], torch.dtype):
            other = rest.pop(0)
            if isinstance(other, torch.Tensor):
                target, rest = CARD if on_card(other) else CPU, [other.dtype]
            else:
                target = target or other
        waits_not = kwargs.pop("non_blocking", False)
        rest = [each for each in rest if isinstance(each, torch.dtype)]
        if target is not None and torch.device(target).type not in ("cpu", "cuda"):
            return func(first, target, *rest, **kwargs)
        with torch._C.DisableTorchFunction():
            is_meta = first.device.type == "meta"
            found = torch.Tensor.to(first, *([CPU] if is_meta else []), *rest, **kwargs) if rest or kwargs else first
        there = on_card(first) if target is None else torch.device(target).type == "cuda"
        if there == on_card(first):
            put(found, there=there)
            if found is not first:
                self._capture(torch.Tensor.to, (first, *rest), kwargs, found)
            return found
        if there:
            if not (waits_not and getattr(first, "_is_pinned", False)):
                self.wait("upload", is_over=False)
            return put(found.clone() if found is first else found)
        copy = put(found.clone(), there=False)
        if waits_not:
            self._state.undone.append((copy, found.detach().clone()))
            copy.detach().zero_()
        else:
            self.wait("download")
        return copy

    def _copies_later(self, target: Any, source: Any, non_blocking: bool = False) -> bool:
        if on_card(target) == on_card(source):
            return False
        if on_card(target):
            if not (non_blocking and getattr(source, "_is_pinned", False)):
                self.wait("upload", is_over=False)
            return False
        if not (non_blocking and getattr(target, "_is_pinned", False)):
            self.wait("download")
            return False
        with torch._C.DisableTorchFunction(), torch.no_grad():
            self._state.undone.append((target, source.detach().clone()))
            target.zero_()
        return True

    def _index(self, tensor: Any, index: Any, value: Any = None, *more: Any, is_read: bool) -> None:
        parts = [each for each in (index if isinstance(index, tuple | list) else (index,)) if each is not None]
        indices = [each for each in parts if isinstance(each, torch.Tensor)]
        for each in indices:
            if on_card(each) and not on_card(tensor):
                raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
            if on_card(tensor) and not on_card(each):
                self.wait("upload", is_over=False)
            if on_card(each) and each.dtype == torch.bool and (is_read or getattr(value, "ndim", 0)):
                self.wait("mask")
        if isinstance(value, torch.Tensor) and on_card(value) != on_card(tensor):
            if indices and value.ndim:
                raise RuntimeError("Expected all tensors to be on the same device: values of index_put_")
            self.wait("upload" if on_card(tensor) else "download", is_over=on_card(value))

    def install(self, monkeypatch: Any) -> None:
        """Make `torch.cuda` show this card, also to parameters and other threads."""
        card, state = self, self._state

        class Stream:
            device = CARD

            def __init__(self, *_: Any, **__: Any) -> None: ...
            def wait_stream(self, _: Any) -> None: ...
            def record(self, _: Any = None) -> None: ...
            def synchronize(self) -> None:
                card.wait("event")

            def is_capturing(self) -> bool:
                return state.calls is not None

            def query(self) -> bool:
                return not state.undone

            def elapsed_time(self, _: Any) -> float:
                return 1.0

        class Graph:
            def pool(self) -> None: ...
            def reset(self) -> None: ...
            def replay(self) -> None:
                with torch._C.DisableTorchFunction(), torch.inference_mode():
                    for func, args, kwargs, found in self.calls:
                        for new, kept in zip(*map(tree_leaves, (func(*args, **kwargs), found)), strict=True):
                            if isinstance(kept, torch.Tensor) and new.data_ptr() != kept.data_ptr():
                                kept.copy_(new)

        @contextlib.contextmanager
        def graph(made: Any, **_: Any) -> Any:
            made.calls = state.calls = []
            try:
                yield
            finally:
                state.calls = None

        state.stream = Stream()
        properties = SimpleNamespace(name="Pretended", major=9, minor=0, total_memory=MEMORY, multi_processor_count=1)
        stand_ins = {
            **dict.fromkeys(("Stream", "Event"), Stream),
            "CUDAGraph": Graph,
            "graph": graph,
            "stream": lambda _: contextlib.nullcontext(),
            **dict.fromkeys(("_lazy_init", "empty_cache", "graph_pool_handle"), lambda: None),
            **dict.fromkeys(("set_device", "set_stream", "manual_seed_all"), lambda _: None),
            **dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), lambda: True),
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            **dict.fromkeys(("current_stream", "default_stream"), lambda _=None: state.stream),
            **dict.fromkeys(("memory_allocated", "max_memory_allocated"), lambda _=None: 0),
            **dict.fromkeys(("memory_reserved", "max_memory_reserved"), lambda _=None: 0),
            "reset_peak_memory_stats": lambda _=None: None,
            "set_per_process_memory_fraction": lambda *_: None,
            "get_per_process_memory_fraction": lambda _=None: 1.0,
            "device": lambda _: contextlib.nullcontext(),
            "synchronize": lambda _=None: card.wait("synchronize"),
            "mem_get_info": lambda _=None: (MEMORY // 2, MEMORY),
            "get_device_properties": lambda _=None: properties,
            "get_device_name": lambda _=None: properties.name,
            "get_device_capability": lambda _=None: (properties.major, properties.minor),
            "is_current_stream_capturing": lambda: state.calls is not None,
            "get_sync_debug_mode": lambda: state.mode,
            "set_sync_debug_mode": lambda mode: setattr(state, "mode", mode),
            "get_rng_state": lambda _=None: torch.zeros(16, dtype=torch.uint8),
            "set_rng_state": lambda *_: None,
        }
        for name, stand_in in stand_ins.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda _=None: state.stream)
        make, run = torch.nn.Parameter.__new__, threading.Thread.run

        def parameter(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
            made = make(cls, data, requires_grad)
            return put(made) if on_card(data) else made

        def run_with_card(thread: threading.Thread) -> None:
            with Card(state):  # modes are a thread's own
                run(thread)

        def kept_to(function: Any) -> Any:
            """What functorch makes of a tensor of the card is on it."""
            return lambda tensor, *more: put(function(tensor, *more), there=on_card(tensor))

        made_of = {
            vmap: ("_add_batch_dim", "_remove_batch_dim"),
            eager_transforms: ("_wrap_for_grad", "_unwrap_for_grad"),
        }
        for module, name in ((module, name) for module, names in made_of.items() for name in names):
            monkeypatch.setattr(module, name, kept_to(getattr(module, name)))
        monkeypatch.setattr(torch.nn.Parameter, "__new__", staticmethod(parameter))
        monkeypatch.setattr(threading.Thread, "run", run_with_card)
