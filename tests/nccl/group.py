"""A communicator: a process group whose operations the referee orders as NCCL does. gloo moves the
data."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.nccl.link import Link
from tests.nccl.operation import Handle, Operation, RefusedError

_REDUCTIONS = ("SUM", "AVG", "MAX", "MIN", "PRODUCT")
Move = Callable[[list[Tensor], list[Tensor], int], Any]


class Communicator(dist.ProcessGroup):
    """A process group of some ranks. A group of one rank copies, and knows no referee."""

    def __init__(
        self, store: Any, rank: int, size: int, timeout: Any, ranks: list[int], name: str
    ) -> None:
        super().__init__(rank, size)
        self.place, self.count, self.comm = rank, size, name
        self.ranks = ranks or list(range(size))
        self.entered = 0  # collectives
        self.batch: list[Operation] | None = None
        self.link: Any = None
        if size > 1:
            self.link = dist.group.WORLD.link if ranks else Link(store, rank, size)  # type: ignore

            def connect(*_: Any) -> None:
                self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

            self._issue(Operation(self.link, "new_group", [], [], connect, is_async=False)).wait()

    def size(self) -> int:
        return self.count

    def rank(self) -> int:
        return self.place

    def getBackendName(self) -> str:
        return "nccl_rules"

    def _get_sequence_number_for_group(self) -> int:
        return self.entered

    def _set_sequence_number_for_group(self) -> None: ...

    def shutdown(self) -> None: ...

    def abort(self) -> None: ...

    # Issue

    def _collective(
        self,
        name: str,
        signature: list[Any],
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        move: Move,
        opts: Any,
        keeps: bool = False,
    ) -> Handle | None:
        self.entered += 1
        is_async = bool(getattr(opts, "asyncOp", True))
        move = move if self.count > 1 else _copy
        operation = Operation(self.link, name, inputs, outputs, move, is_async, keeps)
        operation.signature = signature
        return self._issue(operation)

    def _transfer(self, direction: str, tensor: Tensor, peer: int, move: Move) -> Handle | None:
        inputs, outputs = ([tensor], []) if direction == "send" else ([], [tensor])
        operation = Operation(self.link, direction, inputs, outputs, move)
        operation.transfers = [[direction, self.ranks[peer], tensor.numel(), str(tensor.dtype)]]
        return self._issue(operation)

    def _issue(self, operation: Operation, is_batch: bool = False) -> Handle | None:
        if self.batch is not None:
            self.batch.append(operation)
            return None
        if self.count == 1:
            operation.moves[0](0)
            operation.finished.set()
        elif "lazy" in self.link.rules and operation.transfers and not is_batch:
            # Without `device_id` a pair of ranks makes a communicator for unbatched sends.
            pair = sorted([self.link.rank, operation.transfers[0][1]])
            self.link.issue(operation, f"{self.comm}:{pair[0]}-{pair[1]}", pair)
        else:
            self.link.issue(operation, self.comm, self.ranks)
        handle = Handle(operation)
        if not operation.is_async or self.count == 1:
            handle.wait()
        return handle

    def _start_coalescing(self, device: Any) -> None:
        assert self.batch is None
        self.batch = []

    def _end_coalescing(self, device: Any) -> Handle | None:
        assert self.batch
        (first, *others), self.batch = self.batch, None
        assert len({bool(each.transfers) for each in (first, *others)}) == 1
        if others:
            first.absorb(others)
        return self._issue(first, is_batch=True)

    # Collectives

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Handle | None:
        opts = opts or dist.AllreduceOptions()
        name = _reduction(opts.reduceOp, "all_reduce", tensors)

        def move(sources: list[Tensor], buffers: list[Tensor], _: int) -> None:
            for source, buffer in zip(sources, buffers, strict=True):
                self._reduce(buffer.copy_(source), opts.reduceOp, name)

        signature = [name, *map(_size, tensors)]
        return self._collective("all_reduce", signature, tensors, tensors, move, opts)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Handle | None:
        root, is_root = opts.rootRank, opts.rootRank == self.place

        def move(sources: list[Tensor], buffers: list[Tensor], _: int) -> None:
            self._send_to_all((sources or buffers)[0], root)

        signature = [*_size(tensors[0]), self.ranks[root]]
        ends = (tensors, []) if is_root else ([], tensors)
        return self._collective("broadcast", signature, *ends, move, opts)

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> Handle | None:
        [outputs_of_ranks], [tensor] = outputs, inputs
        sizes = [_size(each) for each in outputs_of_ranks]
        if sizes[self.place] != _size(tensor):
            raise RefusedError(
                "all_gather: this rank's output has another size or type than its input"
            )

        def move(sources: list[Tensor], buffers: list[Tensor], _: int) -> None:
            self._gather(sources[0], buffers)

        ends = [tensor], outputs_of_ranks
        return self._collective("all_gather", sizes, *ends, move, opts, keeps=True)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Handle | None:
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Handle | None:
        for output, tensor in zip(outputs, inputs, strict=True):
            _check_parts("all_gather_into_tensor", output, tensor, self.count)

        def move(sources: list[Tensor], buffers: list[Tensor], _: int) -> None:
            for source, buffer in zip(sources, buffers, strict=True):
                self._gather(source, list(buffer.view(-1).chunk(self.count)))

        name, signature = "all_gather_into_tensor", [_size(each) for each in inputs]
        return self._collective(name, signature, inputs, outputs, move, opts, keeps=True)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any) -> Handle | None:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> Handle | None:
        name = _reduction(opts.reduceOp, "reduce_scatter", inputs)
        for output, tensor in zip(outputs, inputs, strict=True):
            _check_parts("reduce_scatter_tensor", tensor, output, self.count)

        def move(sources: list[Tensor], buffers: list[Tensor], _: int) -> None:
            for source, buffer in zip(sources, buffers, strict=True):
                self._reduce(source, opts.reduceOp, name)
                buffer.view(-1).copy_(source.view(self.count, -1)[self.place])

        signature = [name, *map(_size, inputs)]
        return self._collective("reduce_scatter_tensor", signature, inputs, outputs, move, opts)

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> Handle | None:
        if output.dtype is not tensor.dtype:
            raise RefusedError("all_to_all_single: tensors of unlike types")
        sent = _counts(tensor, input_splits, self.count)
        received = _counts(output, output_splits, self.count)

        def move(sources: list[Tensor], buffers: list[Tensor], tag: int) -> None:
            outgoing = sources[0].view(-1).split(sent)
            incoming = buffers[0].view(-1).split(received)
            incoming[self.place].copy_(outgoing[self.place])
            works = []
            for peer in set(range(self.count)) - {self.place}:
                if received[peer]:
                    works.append(self.gloo.recv([_bytes(incoming[peer])], peer, tag))
                if sent[peer]:
                    works.append(self.gloo.send([_bytes(outgoing[peer])], peer, tag))
            for work in works:
                work.wait()

        signature = [str(tensor.dtype), sent, received]
        return self._collective("all_to_all_single", signature, [tensor], [output], move, opts)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Handle | None:
        is_root = opts.rootRank == self.place
        outputs_of_ranks = outputs[0] if is_root else []
        if any(_size(each) != _size(inputs[0]) for each in outputs_of_ranks):
            raise RefusedError("gather: an output has another size or type than the input")

        def move(sources: list[Tensor], buffers: list[Tensor], _: int) -> None:
            others = [torch.empty_like(sources[0]) for _ in self.ranks]
            self._gather(sources[0], buffers if is_root else others)

        signature = [*_size(inputs[0]), self.ranks[opts.rootRank]]
        return self._collective("gather", signature, inputs, outputs_of_ranks, move, opts)

    def barrier(self, opts: Any = None) -> Handle | None:
        self.entered += 1
        return self._issue(Operation(self.link, "barrier", [], [], lambda *_: None, is_async=False))

    # Sends and receives

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Handle | None:
        def move(sources: list[Tensor], _: list[Tensor], number: int) -> None:
            self.gloo.send([_bytes(sources[0])], peer, number).wait()

        return self._transfer("send", tensors[0], peer, move)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Handle | None:
        def move(_: list[Tensor], buffers: list[Tensor], number: int) -> None:
            self.gloo.recv([_bytes(buffers[0])], peer, number).wait()

        return self._transfer("recv", tensors[0], peer, move)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> None:
        raise RefusedError("ProcessGroupNCCL does not support recvAnysource")

    def monitored_barrier(self, *_: Any, **__: Any) -> None:
        raise RefusedError("monitored_barrier is only implemented for GLOO backend")

    # The names of torch before 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # Movement of data by gloo

    def _reduce(self, tensor: Tensor, op: Any, name: str) -> None:
        """Reduce in place. gloo has no mean and no booleans."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM if name == "AVG" else op
        if tensor.dtype is torch.bool:
            options.reduceOp = dist.ReduceOp.MAX if name == "SUM" else op
        if tensor.numel():
            data = tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor
            self.gloo.allreduce([data], options).wait()
        if name == "AVG":
            tensor.div_(self.count)

    def _send_to_all(self, tensor: Tensor, root: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = root
        if tensor.numel():
            self.gloo.broadcast([_bytes(tensor)], options).wait()

    def _gather(self, source: Tensor, parts: list[Tensor]) -> None:
        parts[self.place].view(-1).copy_(source.view(-1))
        for root, part in enumerate(parts):
            self._send_to_all(part, root)


def _copy(sources: list[Tensor], buffers: list[Tensor], _: int) -> None:
    for source, buffer in zip(sources, buffers, strict=False):
        buffer.view(-1).copy_(source.view(-1))


def _size(tensor: Tensor) -> list[Any]:
    return [str(tensor.dtype), tensor.numel()]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _reduction(op: Any, name: str, tensors: list[Tensor]) -> str:
    found = next((each for each in _REDUCTIONS if op == getattr(dist.ReduceOp, each)), None)
    if found is None:
        raise RefusedError(f"{name}: NCCL reduces by {', '.join(_REDUCTIONS)} only")
    if found == "AVG" and any(tensor.dtype is torch.bool for tensor in tensors):
        raise RefusedError(f"{name}: cannot use ReduceOp.AVG with boolean inputs")
    return found


def _check_parts(name: str, whole: Tensor, part: Tensor, count: int) -> None:
    if part.numel() * count != whole.numel() or part.dtype is not whole.dtype:
        raise RefusedError(f"{name}: one tensor must have {count} times the size of the other")


def _counts(tensor: Tensor, splits: list[int], size: int) -> list[int]:
    rows = tensor.shape[0] if tensor.dim() else 1
    if not splits and rows % size:
        raise RefusedError("all_to_all_single: dimension 0 does not divide equally")
    splits = splits or [rows // size] * size
    if sum(splits) != rows:
        raise RefusedError("all_to_all_single: the splits do not add up to dimension 0")
    return [count * (tensor.numel() // rows if rows else 0) for count in splits]
