"""Assumed speed of a device, and the time that work takes on it."""

from dataclasses import dataclass

from megatron_vlm.planner.flops import OpCount


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

    def seconds(self, work: OpCount, ep: int = 1) -> float:
        """Return the seconds that a rank takes for this work. `ep` neighbours divide the
        experts."""
        compute_s = (
            work.matmul / self.matmul + work.attention / self.attention + work.moved / self.moved
        )
        launch_s = work.layers * self.layer_s
        send_s = work.reduced / self.link + self.exchange(work.exchanged, ep)
        return (max(compute_s, launch_s) if self.starts_ahead else compute_s + launch_s) + send_s

    def exchange(self, size: float, ranks: int) -> float:
        """Return the seconds of an all-to-all. Links and network are busy at the same time."""
        inside, outside = all_to_all(size, ranks, self.devices)
        return max(inside / self.link, outside / self.network)

    def bandwidth_between(self, ranks: int) -> float:
        """Return the bytes per second from one rank to another in a group of this many
        neighbours."""
        return self.link if ranks <= self.devices else self.network


def all_to_all(size: float, ranks: int, devices: int) -> tuple[float, float]:
    """Return the bytes that each rank sends to others of its machine, and to other machines. Each
    rank has `size` bytes, divided evenly among all ranks and itself."""
    near = min(ranks, devices)
    return size * (near - 1) / ranks, size * (ranks - near) / ranks


# Fractions of a GPU's peak, estimated from the kernels of an 8B step on an H200; see
# docs/planning.md.
EFFICIENCY = 0.6
_ATTENTION = 0.26  # fraction of the speed of matrix products
_OPERATIONS_PER_BYTE = 200
_NVLINK, _PCIE = 350e9, 25e9
_WITHOUT_NVLINK = ("L40S", "L4", "RTX")
_NETWORK = 40e9
_LAYER_S = 0.3e-3


def gpu(name: str, peak: float, efficiency: float = EFFICIENCY) -> Machine:
    """Return a GPU with this dense bf16 peak. `efficiency` is the fraction of it that matrix
    products reach."""
    matmul = efficiency * peak
    link = _PCIE if name.startswith(_WITHOUT_NVLINK) else _NVLINK
    return Machine(
        name,
        matmul,
        _ATTENTION * matmul,
        peak / _OPERATIONS_PER_BYTE,
        link,
        min(link, _NETWORK),
        _LAYER_S,
    )


# One core of a server, in fp32, fitted to the stages of benchmarks/plan.py on a Zen 4. Only the
# ratios matter: they determine the split of the layers.
CPU = Machine("a CPU core", 68e9, 110e9, 25e9, 2e9, 1e9, 2.5e-3, starts_ahead=False)
