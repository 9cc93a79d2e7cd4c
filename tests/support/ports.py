"""Addresses on which processes listen, according to the kernel."""

import os
import socket
from pathlib import Path

_LISTEN = "0A"
_TABLES = (("/proc/net/tcp", socket.AF_INET), ("/proc/net/tcp6", socket.AF_INET6))


def listening(pids: list[int]) -> set[tuple[str, int]]:
    """Return address and port of every TCP socket on which one of these processes listens."""
    sockets = {}
    for table, family in _TABLES:
        for line in Path(table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == _LISTEN:
                address, port = words[1].split(":")
                sockets[f"socket:[{words[9]}]"] = (_written(address, family), int(port, 16))
    return {sockets[link] for pid in pids for link in _links(pid) if link in sockets}


def descendants(pid: int) -> list[int]:
    """Return the process and all processes that it has started, directly or not."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # the process has ended
            continue
        children.setdefault(parent, []).append(int(entry.name))
    pids = [pid]
    for ancestor in pids:
        pids += children.get(ancestor, [])
    return pids


def is_loopback(address: str) -> bool:
    return address.removeprefix("::ffff:").startswith("127.") or address == "::1"


def outward_address() -> str | None:
    """Return this machine's address towards other machines, if it has one. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        address: str = probe.getsockname()[0]
        return None if is_loopback(address) else address


def _written(address: str, family: int) -> str:
    """Return an address as text. The kernel prints words of four bytes, each in the machine's
    order."""
    raw = bytes.fromhex(address)
    words = (raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
    return socket.inet_ntop(family, b"".join(words))


def _links(pid: int) -> list[str]:
    links = []
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            links.append(os.readlink(entry))
    except OSError:  # the process has ended, or it has closed this file
        pass
    return links
