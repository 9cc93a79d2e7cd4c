"""The store of a job: where it listens, and what ranks write to it that nobody else could.

torch's store listens at every address, and whoever connects to it can list, read and write all
keys. So that of one machine listens on loopback; and what ends a job or lets it go on is sealed
with the job's secret, which the launcher gives to the ranks in their environment.
"""

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
    """The store cannot listen where it should."""


def stay_on_this_machine() -> bool:
    """Whether all ranks run here, as far as the launcher's variables tell; then gloo and NCCL use
    loopback, unless the user has named other interfaces."""
    world, master = os.environ.get("WORLD_SIZE", "1"), os.environ.get("MASTER_ADDR", "")
    here = world in ("1", os.environ.get("LOCAL_WORLD_SIZE")) or is_loopback(master)
    if here:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, _INTERFACE)
    return here


def is_loopback(host: str) -> bool:
    """By its name alone: many machines resolve their own name to a loopback address, too."""
    return host in ("localhost", "::1") or host.startswith("127.")


def listen_at(host: str, port: int, timeout: datetime.timedelta = _PATIENCE) -> dist.TCPStore:
    """A store that listens at this address of the machine and no other; port 0 takes a free one."""
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
    """The keys of this job in a store that others may use, too. Their names do not tell the
    secret."""
    return dist.PrefixStore(f"megatron-vlm-{_digest(b'keys')[:16]}", store)


class SignedStore:
    """What ranks tell each other through the store, each text under a seal. Others can remove it or
    overwrite it, but nothing that they write is read."""

    def __init__(self, store: Any):
        self.store = store

    def write(self, key: str, text: str) -> None:
        """In place of what the key had."""
        self.store.set(key, self._seal(key, text.encode()) + text.encode())

    def read(self, key: str) -> str | None:
        """None if a rank has not written it, or somebody else has overwritten it."""
        if not self.store.check([key]):
            return None
        value = self.store.get(key)
        seal, text = value[:_SEAL_BYTES], value[_SEAL_BYTES:]
        return text.decode() if hmac.compare_digest(seal, self._seal(key, text)) else None

    @staticmethod
    def _seal(key: str, text: bytes) -> bytes:
        return _digest(b"text\0" + key.encode() + b"\0" + text).encode()


def _digest(words: bytes) -> str:
    """Only who has the secret can make it."""
    secret = os.environ.get(SECRET, "").encode()
    return hmac.new(secret, words, hashlib.sha256).hexdigest()
