"""Store of a job: its address, and messages of ranks that nobody else can forge.

Anyone who connects to torch's store can read and write all keys. So the store of a single machine
listens on loopback, and messages that end a job or let it continue are signed with the job's
secret, which the launcher passes to the ranks in their environment."""

import datetime
import hashlib
import hmac
import os
import socket
import sys
from typing import Any

import torch.distributed as dist

from megatron_vlm.distributed.process import SECRET
from megatron_vlm.errors import MegatronVLMError

LOOPBACK = "127.0.0.1"
_PATIENCE = datetime.timedelta(minutes=5)
_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
_SEAL_BYTES = 2 * hashlib.sha256().digest_size


class StoreError(MegatronVLMError):
    """The store cannot listen at its address."""


def stay_on_this_machine() -> bool:
    """Return whether all ranks run on this machine, by the launcher's variables. In that case gloo
    and NCCL use loopback, unless the user has named other interfaces."""
    world, master = os.environ.get("WORLD_SIZE", "1"), os.environ.get("MASTER_ADDR", "")
    # A loopback is known by its name: many machines resolve their own name to such an address, too.
    is_loopback = master in ("localhost", "::1") or master.startswith("127.")
    is_local = is_loopback or world in ("1", os.environ.get("LOCAL_WORLD_SIZE"))
    if is_local:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, _INTERFACE)
    return is_local


def listen_at(host: str, port: int, timeout: datetime.timedelta = _PATIENCE) -> dist.TCPStore:
    """Open a store that listens only at this address of the machine. Port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise StoreError(
            f": rank 0 cannot listen at {host}: {error.strerror}",
            key="MASTER_PORT",
            found=port,
            remedy="set it to a free port of the machine of rank 0",
        ) from error
    return dist.TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def part_of_job(store: Any) -> Any:
    """Return the keys of this job in a store of others, too. No name reveals the secret."""
    return dist.PrefixStore(f"megatron-vlm-{_digest(b'keys')[:16]}", store)


class SignedStore:
    """Messages of ranks through the store, each with a signature. Others can remove or overwrite a
    message, but nothing that they write is accepted."""

    def __init__(self, store: Any):
        self.store = store

    def write(self, key: str, text: str) -> None:
        """Write the text of a key, in place of the previous one."""
        self.store.set(key, self._seal(key, text.encode()) + text.encode())

    def read(self, key: str) -> str | None:
        """Read a key. Return None if no rank has written it, or if somebody has overwritten it."""
        return self._open(key, self.store.get(key)) if self.store.check([key]) else None

    def read_all(self, keys: list[str]) -> list[str | None]:
        """Read several keys, by two requests if all are there: many ranks read one store."""
        if not self.store.check(keys):
            return [self.read(key) for key in keys]
        return [self._open(*pair) for pair in zip(keys, self.store.multi_get(keys), strict=True)]

    def _open(self, key: str, value: bytes) -> str | None:
        seal, text = value[:_SEAL_BYTES], value[_SEAL_BYTES:]
        return text.decode() if hmac.compare_digest(seal, self._seal(key, text)) else None

    @staticmethod
    def _seal(key: str, text: bytes) -> bytes:
        return _digest(b"text\0" + key.encode() + b"\0" + text).encode()


def _digest(words: bytes) -> str:
    """Return a digest that only an owner of the secret can make."""
    secret = os.environ.get(SECRET, "").encode()
    return hmac.new(secret, words, hashlib.sha256).hexdigest()
