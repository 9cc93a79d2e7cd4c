"""Download of files over http(s), from public addresses only: a data set must not reach a private
network. A name is resolved once, and the connection is made to the address that was checked, also
after a redirect. A server may be slow or hostile: bytes and time are bounded, and content that
would have to be unpacked is refused."""

import ipaddress
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpx

from megatron_vlm.errors import DataError
from megatron_vlm.io.untrusted import reason

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address

MAX_BYTES = 64 * 2**20
MAX_REDIRECTS = 3
TIMEOUT_S = 20.0  # limit without a single byte, and for a TLS handshake
TOTAL_S = 120.0  # limit for the whole download
_COPY = "copy the file to data.image_root"


# The last 32 bits of these IPv6 addresses are an IPv4 address to which packets go on. They are
# IPv4-compatible, IPv4-mapped, IPv4-translated and NAT64.
_ENDING_IN_IPV4 = tuple(
    ipaddress.IPv6Network(f"{prefix}/96")
    for prefix in ("::", "::ffff:0:0", "::ffff:0:0:0", "64:ff9b::")
)
_ISATAP = 0x5EFE  # precedes the last 32 bits, apart from the bits of the scope
_ISATAP_BITS = 0xFDFFFFFF
_UNICAST = ipaddress.IPv6Network("2000::/3")  # the range that IANA assigns for the internet


def is_public(address: str) -> bool:
    """Return whether the address, and each address in it, belongs to the public internet."""
    return all(map(_is_public, _unwrap_address(ipaddress.ip_address(address))))


def _unwrap_address(address: _Address) -> list[_Address]:
    """Return the addresses that packets to this one may go to."""
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    last = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    if any(address in network for network in _ENDING_IN_IPV4):
        return [last]
    if inner := address.teredo or address.sixtofour:
        return [*inner] if isinstance(inner, tuple) else [inner]
    if int(address) >> 32 & _ISATAP_BITS == _ISATAP:
        return [address, last]
    return [address]


def _is_public(address: _Address) -> bool:
    if address.is_multicast or not address.is_global:
        return False
    if isinstance(address, ipaddress.IPv6Address):
        return address in _UNICAST
    return not address.is_reserved


def fetch(url: str, where: str, allowed: Callable[[str], bool] = is_public) -> bytes:
    """Return the content of a URL, at most MAX_BYTES, or raise a DataError at `where`."""
    deadline = _Deadline()
    try:
        with deadline.running(TOTAL_S):
            body = _follow_redirects(url, where, allowed, deadline)
    except Exception as error:  # sockets, ssl, httpx and its dependencies raise many kinds
        if isinstance(error, DataError):
            raise
        if not deadline.over:
            raise DataError(f"cannot be fetched: {reason(error)}", place=where) from error
    if deadline.over:  # the body may be incomplete, even without an error
        raise DataError(f"was not fetched within {TOTAL_S:g} s", place=where, remedy=_COPY)
    return body


class _Deadline:
    """Deadline that ends the connection when the time is over. A time-out of each read would
    not suffice: a server that sends a byte now and then could hold a rank for ever."""

    def __init__(self) -> None:
        self.over = False
        self._socket: socket.socket | None = None

    @contextmanager
    def running(self, seconds: float) -> Iterator[None]:
        timer = threading.Timer(seconds, self._end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def trace(self, event: str, info: dict[str, Any]) -> None:
        """Keep the socket of each connection; httpx calls this as it makes progress."""
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            self._socket = info["return_value"].get_extra_info("socket")
            if self.over:
                self._end()

    def _end(self) -> None:
        self.over = True
        if self._socket is not None:
            with suppress(OSError):  # it was closed just now
                # SSLSocket.shutdown would drop the TLS state that the reading thread still uses.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)


def _follow_redirects(
    url: str, where: str, allowed: Callable[[str], bool], deadline: _Deadline
) -> bytes:
    for _ in range(MAX_REDIRECTS + 1):
        body, location = _request(url, where, allowed, deadline)
        if location is None:
            return body
        url = urljoin(url, location)
    raise DataError(f"has more than {MAX_REDIRECTS} redirects", place=where)


def _request(
    url: str, where: str, allowed: Callable[[str], bool], deadline: _Deadline
) -> tuple[bytes, str | None]:
    """Make one request. Return the body and None, or no body and the address of a redirect."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise DataError(f"redirects to {url[:120]!r}, which is not http(s)", place=where)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    address = str(socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)[0][4][0])
    if not allowed(address):
        raise DataError(
            f": {parts.hostname} is at {address}, which is not a public address",
            place=where,
            remedy=_COPY,
        )
    host = f"[{address}]" if ":" in address else address
    target = httpx.URL(url).copy_with(host=host)
    headers = {"Host": parts.netloc.rpartition("@")[2], "Accept-Encoding": "identity"}
    more = {"sni_hostname": parts.hostname, "trace": deadline.trace}
    # No proxy is used: it would resolve the name itself, and the check would mean nothing.
    with (
        httpx.Client(timeout=TIMEOUT_S, trust_env=False) as client,
        client.stream("GET", target, headers=headers, extensions=more) as response,
    ):
        if response.has_redirect_location:
            return b"", response.headers["location"]
        if response.status_code != 200:
            raise DataError(f": the server answers {response.status_code}", place=where)
        return _body(response, where), None


def _body(response: httpx.Response, where: str) -> bytes:
    """Read the content as it comes, never unpacked: a few KB may unpack to gigabytes."""
    encoding = response.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        raise DataError(
            f"is compressed by the server (Content-Encoding: {encoding[:60]}), although the "
            "request forbids it",
            place=where,
            remedy=_COPY,
        )
    body = bytearray()
    for piece in response.iter_raw():
        body += piece
        if len(body) > MAX_BYTES:
            raise DataError(f"is larger than {MAX_BYTES // 2**20} MiB", place=where)
    return bytes(body)
