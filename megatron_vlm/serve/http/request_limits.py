"""How much a client may ask for."""

from dataclasses import dataclass

from megatron_vlm.serve.protocol.payloads import Datum, Picture, RequestError


@dataclass(frozen=True)
class RequestLimits:
    """What is above is refused with the name of the limit and its value."""

    # of a request
    body_bytes: int = 256 * 2**20  # of a forward_backward
    unpacked_bytes: int = 512 * 2**20
    sample_bytes: int = 64 * 2**20  # of an asample
    form_bytes: int = 4 * 2**20  # of anything else
    body_seconds: float = 120.0  # from its first to its last byte
    headers_seconds: float = 20.0
    header_bytes: int = 64 * 2**10
    data: int = 4096
    chunks: int = 1024  # of a datum or a prompt
    pictures: int = 64
    tokens: int = 2**20  # of a datum or a prompt, without its pictures
    pixels: int = 2**30  # of the pictures of a request, as sent or resized, whichever is more
    waiting_pixels: int = 2**31  # of requests that are read before their turn
    # of a sample
    max_tokens: int = 2**16
    num_samples: int = 256
    top_k: int = 1024
    stop: int = 64
    # of a key, at a time
    open_calls: int = 4096
    open_bytes: int = 4 * 2**30
    sessions: int = 256
    models: int = 64  # whose clients were heard of lately
    snapshot_seconds: float = 1800.0  # that one is kept which is not the model's newest
    # of the server
    connections: int = 4096
    bodies_bytes: int = 2 * 2**30  # being received, together
    # of what is answered
    answer_seconds: float = 120.0  # that a client may take to read a part of it
    poll_seconds: float = 40.0
    url_seconds: float = 3600.0
    client_samples: int = 512  # that one client has in flight


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
    for name, found, most in (
        ("chunks", chunks, limits.chunks),
        ("pictures", pictures, limits.pictures),
        ("tokens", tokens, limits.tokens),
    ):
        if found > most:
            raise RequestError(f"has {found} {name}, and limit {name} is {most}", key=where)
