"""Names by which a browser on this machine reaches a server that answers nobody else."""

from urllib.parse import urlsplit


def is_loopback_host(host: str) -> bool:
    """Return whether the Host of a request, which may have a port, is a name of loopback."""
    try:
        return urlsplit(f"//{host}").hostname in ("localhost", "127.0.0.1", "::1")
    except ValueError:
        return False
