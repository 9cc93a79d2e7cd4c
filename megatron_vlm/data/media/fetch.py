"""Files over http(s), from public addresses only: a data set must not reach a private network.

A name is resolved once, its address checked, and the connection made to that same address, so a
name that resolves differently the second time gains nothing. Redirects pass the same check.
"""

import ipaddress
import socket
from collections.abc import Callable
from urllib.parse import urljoin, urlsplit

import httpx

from megatron_vlm.errors import DataError

MAX_BYTES = 64 * 2**20
MAX_REDIRECTS = 3
TIMEOUT_S = 20.0


def is_public(address: str) -> bool:
    """Whether the address belongs to the public internet."""
    parsed = ipaddress.ip_address(address)
    mapped = getattr(parsed, "ipv4_mapped", None)
    return (mapped or parsed).is_global


def fetch(url: str, where: str, allowed: Callable[[str], bool] = is_public) -> bytes:
    """The content of a URL, at most MAX_BYTES, or a DataError that starts with `where`."""
    try:
        for _ in range(MAX_REDIRECTS + 1):
            body, location = _request(url, where, allowed)
            if location is None:
                return body
            url = urljoin(url, location)
    except (OSError, ValueError, httpx.HTTPError, httpx.InvalidURL) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{where}: cannot be fetched: {error}") from error
    raise DataError(f"{where}: more than {MAX_REDIRECTS} redirects")


def _request(url: str, where: str, allowed: Callable[[str], bool]) -> tuple[bytes, str | None]:
    """One request: the body and None, or the address that it redirects to."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise DataError(f"{where}: redirects to {url[:120]!r}, which is not http(s)")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    address = str(socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)[0][4][0])
    if not allowed(address):
        raise DataError(
            f"{where}: {parts.hostname} is at {address}, which is not a public address; "
            "copy the file to data.image_root"
        )
    host = f"[{address}]" if ":" in address else address
    target = httpx.URL(url).copy_with(host=host)
    headers, names = {"Host": parts.netloc.rpartition("@")[2]}, {"sni_hostname": parts.hostname}
    # No proxy: it would resolve the name itself, and the check would mean nothing.
    with (
        httpx.Client(timeout=TIMEOUT_S, trust_env=False) as client,
        client.stream("GET", target, headers=headers, extensions=names) as response,
    ):
        if response.is_redirect:
            return b"", response.headers["location"]
        if response.status_code != 200:
            raise DataError(f"{where}: the server answers {response.status_code}")
        body = bytearray()
        for piece in response.iter_bytes():
            body += piece
            if len(body) > MAX_BYTES:
                raise DataError(f"{where}: larger than {MAX_BYTES // 2**20} MiB")
        return bytes(body), None
