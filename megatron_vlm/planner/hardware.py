"""Assumed speed of a device, and the time that work takes on it."""

import re
from dataclasses import dataclass

from megatron_vlm.config.optimizer_spec import OptimizerSpec
from megatron_vlm.distributed.device import CARDS, WITHOUT_BF16, card_of
from megatron_vlm.planner.flops import OpCount

_FP32 = 4  # bytes


@dataclass(frozen=True)
class Machine:
    """Speeds of one device, per second: operations and bytes."""

    name: str
    matmul: float  # operations of matrix products
    attention: float  # operations of attention
    moved: float  # bytes read and written in its own memory
    link: float  # bytes to another device of the machine
    network: float  # bytes to a device of another machine
    layer_s: float  # seconds to start the kernels of a layer's forward, for any number of tokens
    devices: int = 8  # devices of a machine
    starts_ahead: bool = True  # kernels run while the host starts the next ones
    card: str | None = None  # its entry in CARDS, whose bandwidth `moved` is scaled by
    host_link: float = 22e9  # bytes from the device to host memory, or back
    host_moved: float = 25e9  # bytes that the host reads and writes for one device
    host_cores: int = 1  # cores of the host for one device

    def seconds(self, work: OpCount, ep: int = 1) -> float:
        """Return the seconds of this work on a rank. `ep` neighbours divide the experts."""
        compute_s = work.matmul / self.matmul + work.attention / self.attention
        compute_s += work.moved / self.moved
        launch_s = work.layers * self.layer_s
        send_s = work.reduced / self.link + self.exchange(work.exchanged, ep)
        done_s = max(compute_s, launch_s) if self.starts_ahead else compute_s + launch_s
        # Copies to the host and back run meanwhile, each in a direction of its own.
        return max(done_s + send_s, work.offloaded / self.host_link)

    def host_update(self, weights: float, itemsize: int, optimizer: OptimizerSpec) -> float:
        """Return the seconds of an optimizer step over weights in host memory, which travel while
        others are updated. An update reads gradient, weight and states, and writes the last two."""
        travel_s = (_FP32 + itemsize) / self.host_link
        state_bytes = len(optimizer.state_names) * optimizer.bytes_of_state
        memory_s = (3 * _FP32 + 2 * state_bytes) / self.host_moved
        compute_s = _HOST_CORE_S[optimizer.states] / self.host_cores
        return weights * max(travel_s, memory_s, compute_s)

    def exchange(self, size: float, ranks: int) -> float:
        """Return the seconds of an all-to-all. Links and network are busy at the same time."""
        # Each rank has `size` bytes, divided evenly among all ranks and itself.
        near = min(ranks, self.devices)
        inside, outside = size * (near - 1) / ranks, size * (ranks - near) / ranks
        return max(inside / self.link, outside / self.network)

    def bandwidth_between(self, ranks: int) -> float:
        """Return the bytes per second between ranks in a group of this many neighbours."""
        return self.link if ranks <= self.devices else self.network


# Fractions of a GPU's peak, estimated from the kernels of an 8B step on an H200; see
# docs/planning.md.
EFFICIENCY = 0.6
_ATTENTION = 0.26  # fraction of the speed of matrix products
# The same estimate for everything else: an H200 moves a byte in the time of 200 operations at peak.
# That is a little more than its memory's bandwidth, since caches answer a part. Another card is
# assumed to reach the same multiple of its own bandwidth.
_OPERATIONS_PER_BYTE = 200
MOVED_PER_BANDWIDTH = CARDS["H200"].peak / _OPERATIONS_PER_BYTE / CARDS["H200"].bandwidth
_NVLINK, _PCIE = 350e9, 25e9
# Assumed of the way to host memory: PCIe 3.0 to 5.0 with 16 lanes, and NVLink-C2C, each with about
# 70 % of its peak in one direction. Two sockets with eight channels of DDR5 each, half of whose
# bandwidth AdamW reaches on the CPU, are shared by eight devices.
_HOST_PCIE3, _HOST_PCIE4, _HOST_PCIE5, _HOST_C2C = 11e9, 22e9, 45e9, 300e9
_CARDS_PCIE5 = ("H200", "H100", "H800", "H20", "B200", "RTX PRO 6000", "RTX 5090")
_CARDS_C2C = ("GB200", "GH200")
_HOST_MOVED, _HOST_CORES = 40e9, 8
# Seconds of one core to update a weight, by the type of the moments, measured on an EPYC with AVX2.
_HOST_CORE_S = {"fp32": 1e-9, "bf16": 14e-9, "int8": 52e-9}
_WITHOUT_NVLINK = re.compile(r"\b(A40|A10G?|L40S|L4|T4|RTX)\b")
_NETWORK = 40e9
_LAYER_S = 0.3e-3


def gpu(name: str, peak: float, efficiency: float = EFFICIENCY) -> Machine:
    """Return a GPU with this dense bf16 peak, of which matrix products reach the `efficiency`. A
    card of unknown memory moves bytes in proportion to its peak, as an H200 does."""
    matmul = efficiency * peak
    card = card_of(name)
    link = _PCIE if _WITHOUT_NVLINK.search(card or name) else _NVLINK
    moved = peak / _OPERATIONS_PER_BYTE
    if card is not None:
        moved = MOVED_PER_BANDWIDTH * CARDS[card].bandwidth
    return Machine(
        *(name, matmul, _ATTENTION * matmul, moved, link, min(link, _NETWORK), _LAYER_S),
        card=card,
        host_link=_host_link(card),
        host_moved=_HOST_MOVED,
        host_cores=_HOST_CORES,
    )


def _host_link(card: str | None) -> float:
    if card in _CARDS_C2C:
        return _HOST_C2C
    if card in WITHOUT_BF16:
        return _HOST_PCIE3
    return _HOST_PCIE5 if (card or "").startswith(_CARDS_PCIE5) else _HOST_PCIE4


# One core of a server, in fp32, fitted to the stages of benchmarks/plan.py on a Zen 4. Only the
# ratios matter: they determine the split of the layers.
CPU = Machine("a CPU core", 68e9, 110e9, 25e9, 2e9, 1e9, 2.5e-3, starts_ahead=False)
