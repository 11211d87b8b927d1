"""Several processes for one task: a rank's place among them, and their synchronisation.

The ranks communicate through a TCPStore of their launcher. The store and gloo do not authenticate, and other users of
the node can reach them. So everything that controls the ranks is signed, including what `torch.distributed` pickles.
"""

from __future__ import annotations

import functools
import hmac
import io
import json
import logging
import os
import pickle
import signal
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any

from slurmgpu.util.pipes import EXIT_ABANDONED
from slurmgpu.util.prctl import end_with

log = logging.getLogger(__name__)

LAUNCHER = "SLURMGPU_LAUNCHER"
"""Environment variable of a rank: the process ID of its launcher."""
GROUP_SECRET = "SLURMGPU_GROUP_SECRET"
"""Environment variable of a launcher and its ranks: the secret of their group."""
PEER_PATIENCE_S = 60.0
"""How long a failed rank waits for the others, which may wait for it in a collective forever."""
LOADING_PATIENCE_S = 20.0
"""The same for a rank that cannot load; the end of a rank that has died ends the others sooner, on all nodes."""
PARTING_PATIENCE_S = 600.0
"""The same for a rank that left its item for later: others may still be saving progress."""
ALL_CAME = "all"
FOREVER = timedelta(days=365)
SIGNATURE_BYTES = 32
BLOCKED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that a launcher blocks: it ends with its ranks or when the task says so. Ranks unblock them."""


class PeersMissingError(Exception):
    """Some ranks did not arrive in time; `rank` waited for them, with `value`."""

    def __init__(self, rank: int, value: Any, patience_s: float) -> None:
        super().__init__(f"other ranks did not arrive within {patience_s:g} s")
        self.rank = rank
        self.value = value


@dataclass
class Group:
    """A rank's place in its group; the default is a group of one, which never waits.

    `address` is the TCPStore's, which is also in the environment for `torch.distributed`.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    address: tuple[str, int] = ("", 0)
    secret: str = field(default="", repr=False)
    _turn: int = 0

    @classmethod
    def of_environment(cls) -> Group:
        """The launcher's group, or else a group of one. The process is killed when its launcher ends."""
        environ = os.environ
        launcher, secret = environ.pop(LAUNCHER, None), environ.pop(GROUP_SECRET, "")
        if launcher is None:
            return cls()  # RANK etc. may have another meaning here
        end_with(int(launcher), signal.SIGKILL)
        address = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
        return cls(int(environ["RANK"]), int(environ["WORLD_SIZE"]), int(environ["LOCAL_RANK"]), address, secret)

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which alone claims, reports and publishes."""
        return self.rank == 0

    def gather(self, value: Any = None, patience_s: float | None = None) -> list[Any]:
        """The JSON values of all ranks, in rank order, when all have called this.

        If some ranks do not arrive within `patience_s`, all others raise PeersMissingError, also those that come later.
        """
        if self.world_size == 1:
            return [value]
        from torch.distributed import DistNetworkError

        turn, self._turn = self._turn, self._turn + 1
        try:
            values = self._exchange(turn, value, patience_s)
            if turn:
                # All ranks that reached this turn have read the previous one.
                self._store.delete_key(f"{turn - 1}/{self.rank}")
        except DistNetworkError as error:
            # The launcher is dead, and so is the group. The task notices that itself.
            log.error("the group's store cannot be reached: %s", error)
            os._exit(EXIT_ABANDONED)
        return values

    def _exchange(self, turn: int, value: Any, patience_s: float | None) -> list[Any]:
        from torch.distributed import DistStoreError

        keys = [f"{turn}/{rank}" for rank in range(self.world_size)]
        self._store.set(keys[self.rank], self._signed(keys[self.rank], [value, patience_s]))
        word = ALL_CAME
        try:
            self._store.wait(keys, FOREVER if patience_s is None else timedelta(seconds=patience_s))
        except DistStoreError:
            word = self._first_ending(turn, str(self.rank))
        if word == ALL_CAME:
            said = list(map(self._read, keys, self._store.multi_get(keys)))
            # Without a limit, no rank can have left.
            if all(patience is None for _, patience in said) or (word := self._first_ending(turn, word)) == ALL_CAME:
                return [value for value, _ in said]
        key = keys[int(word)]
        [value, patience_s] = self._read(key, self._store.get(key))
        raise PeersMissingError(int(word), value, patience_s)

    def _first_ending(self, turn: int, word: str) -> str:
        """The end of this turn, as written first: all came, or the rank that left."""
        key = f"{turn}/end"
        return str(self._read(key, self._store.compare_set(key, "", self._signed(key, word))))

    def _signed(self, key: str, value: Any) -> str:
        text = json.dumps(value)
        return f"{sign(self.secret, key, text.encode()).hex()} {text}"

    def _read(self, key: str, said: bytes) -> Any:
        """The value under a key; exits on a wrong signature: another user of the node wrote it."""
        signature, _, text = said.partition(b" ")
        if not hmac.compare_digest(signature, sign(self.secret, key, text).hex().encode()):
            log.error("the group's store has a value with a wrong signature; another user of this node wrote it")
            os._exit(EXIT_ABANDONED)
        return json.loads(text)

    def guard(self) -> None:
        """Make `torch.distributed` refuse to unpickle what no rank of this group has pickled."""
        if self.world_size == 1:
            return
        from torch.distributed import distributed_c10d

        # They are private, but every collective of objects uses them in torch 2.5 to 2.13.
        if not (hasattr(distributed_c10d, "_pickler") and hasattr(distributed_c10d, "_unpickler")):
            log.warning("objects sent by collectives of this torch version are not verified: it pickles differently")
        distributed_c10d._pickler = functools.partial(SigningPickler, self.secret)
        distributed_c10d._unpickler = functools.partial(SigningUnpickler, self.secret)

    def broadcast(self, value: Any = None) -> Any:
        """The value of rank 0."""
        return self.gather(value)[0]

    def leave(self) -> None:
        """Destroy the workload's process group: NCCL complains if a process ends without."""
        distributed = sys.modules.get("torch.distributed")
        if self.world_size > 1 and distributed is not None and distributed.is_initialized():
            distributed.destroy_process_group()

    @cached_property
    def _store(self) -> Any:
        from torch.distributed import PrefixStore, TCPStore

        host, port = self.address
        # Not counted by init_process_group(), and with a key prefix of its own.
        return PrefixStore("slurmgpu", TCPStore(host, port, is_master=False, wait_for_workers=False))


def sign(secret: str, place: str, content: bytes) -> bytes:
    """The signature of `content` for this place."""
    return hmac.digest(secret.encode(), place.encode() + b"\0" + content, "sha256")


class SigningPickler:
    """Writes a pickle after its signature."""

    def __init__(self, secret: str, file: Any) -> None:
        self._secret, self._file = secret, file

    def dump(self, value: Any) -> None:
        """Write the signature and the pickle of `value`."""
        content = pickle.dumps(value)
        self._file.write(sign(self._secret, "pickle", content) + content)


class SigningUnpickler:
    """Reads only what a SigningPickler wrote with the same secret."""

    def __init__(self, secret: str, file: io.BytesIO) -> None:
        self._secret, self._file = secret, file

    def load(self) -> Any:
        """The value; RuntimeError before unpickling if the signature is wrong."""
        content = self._file.read()
        signature, content = content[:SIGNATURE_BYTES], content[SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, sign(self._secret, "pickle", content)):
            raise RuntimeError("a collective of torch.distributed got an object that no rank of this group has sent")
        return pickle.loads(content)
