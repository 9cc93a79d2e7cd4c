"""Limits on what a client may request."""

from dataclasses import dataclass

from megatron_vlm.serve.protocol.payloads import Datum, Picture, RequestError


@dataclass(frozen=True)
class RequestLimits:
    """Limits of the service. A request above a limit is refused with the limit's name and value."""

    # limits of a request
    body_bytes: int = 256 * 2**20  # a forward_backward
    unpacked_bytes: int = 512 * 2**20
    sample_bytes: int = 64 * 2**20  # an asample
    form_bytes: int = 4 * 2**20  # any other request
    body_seconds: float = 120.0  # from its first to its last byte
    headers_seconds: float = 20.0
    header_bytes: int = 64 * 2**10
    data: int = 4096
    chunks: int = 1024  # per datum or prompt
    pictures: int = 64
    tokens: int = 2**20  # per datum or prompt, without its pictures
    pixels: int = 2**30  # all pictures of a request, as sent or resized, whichever is more
    waiting_pixels: int = 2**31  # all requests that are read before their turn
    # limits of a sample
    max_tokens: int = 2**16
    num_samples: int = 256
    top_k: int = 1024
    stop: int = 64
    # limits of a key at a time
    open_calls: int = 4096
    open_bytes: int = 4 * 2**30
    sessions: int = 256
    models: int = 64  # models of recently active clients
    snapshot_seconds: float = 1800.0  # a snapshot's life once the model has a newer one
    # limits of the server
    connections: int = 4096
    bodies_bytes: int = 2 * 2**30  # all bodies that are being received
    # limits of responses
    answer_seconds: float = 120.0  # a client's time to read a part of the response
    poll_seconds: float = 40.0
    url_seconds: float = 3600.0
    client_samples: int = 512  # samples that one client has in flight


def check_datums(data: tuple[Datum, ...], limits: RequestLimits) -> None:
    """Refuse a forward_backward that is too large, naming the datum."""
    if len(data) > limits.data:
        raise RequestError(f"has {len(data)} datums, and limit data is {limits.data}", key="data")
    for i, datum in enumerate(data):
        pictures = sum(isinstance(chunk, Picture) for chunk in datum.chunks)
        tokens = sum(len(c.tokens) for c in datum.chunks if not isinstance(c, Picture))
        check_chunks(f"data[{i}].model_input", len(datum.chunks), pictures, tokens, limits)


def check_chunks(
    where: str, chunks: int, pictures: int, tokens: int, limits: RequestLimits
) -> None:
    """Refuse too many chunks, pictures or tokens."""
    for name, count, maximum in (
        ("chunks", chunks, limits.chunks),
        ("pictures", pictures, limits.pictures),
        ("tokens", tokens, limits.tokens),
    ):
        if count > maximum:
            raise RequestError(f"has {count} {name}, and limit {name} is {maximum}", key=where)
