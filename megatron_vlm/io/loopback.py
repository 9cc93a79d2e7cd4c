"""Names by which a browser on this machine reaches a server that answers nobody else."""

from ipaddress import ip_address
from urllib.parse import urlsplit


def is_loopback_host(host: str) -> bool:
    """Return whether the Host of a request, which may have a port, is a name of loopback."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False
