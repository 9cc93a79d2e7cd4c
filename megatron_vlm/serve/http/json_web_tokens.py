"""JSON Web Tokens in place of an API key, for an hour each, signed with HMAC-SHA256."""

import base64
import binascii
import hashlib
import hmac
import json
import time
from typing import Any

OWNER = "tml:organization_user:"  # beginning of owners' names, as clients expect it
_ORGANIZATION = "megatron-vlm"
_SECONDS = 3600
_HEADER = {"alg": "HS256", "typ": "JWT"}


def looks_like_token(key: str) -> bool:
    """Return whether this has the three parts of a token. API keys have no dots."""
    return key.count(".") == 2


def issue_token(name: str, secret: bytes) -> str:
    """Return a token for the owner of a key."""
    now = int(time.time())
    claims = {
        "sub": OWNER + name,
        "org_id": _ORGANIZATION,
        "email": "",
        "iat": now,
        "exp": now + _SECONDS,
    }
    content = f"{_encode(_HEADER)}.{_encode(claims)}"
    return f"{content}.{_signature(content, secret)}"


def claimed_name(token: str) -> str | None:
    """Return the name that a token claims, which `is_valid` checks."""
    subject = _claims(token).get("sub")
    return subject.removeprefix(OWNER) if isinstance(subject, str) else None


def is_valid(token: str, secret: bytes) -> bool:
    """Return whether a token was signed with this secret and has not expired."""
    content, _, signature = token.rpartition(".")
    if not hmac.compare_digest(signature.encode(), _signature(content, secret).encode()):
        return False
    return bool(_claims(token)["exp"] > time.time())


def _claims(token: str) -> dict[str, Any]:
    """Return the content of a token, or nothing if it cannot be read."""
    part = token.split(".")[1]
    try:
        value = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    except (ValueError, RecursionError, binascii.Error):
        return {}
    return value if isinstance(value, dict) else {}


def _signature(content: str, secret: bytes) -> str:
    return _base64(hmac.digest(secret, content.encode(), hashlib.sha256))


def _encode(value: dict[str, Any]) -> str:
    return _base64(json.dumps(value).encode())


def _base64(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).rstrip(b"=").decode()
