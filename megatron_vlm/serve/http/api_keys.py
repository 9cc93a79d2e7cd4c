"""API keys of a service. The key file has one line per key, `NAME SHA256`; the keys themselves are
not stored. A JSON Web Token, signed with HMAC-SHA256, takes the place of a key for an hour."""

import base64
import binascii
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import threading
import time
from pathlib import Path
from typing import Any

from starlette.requests import Request

from megatron_vlm.errors import ConfigError
from megatron_vlm.serve.http.request_bodies import HttpError

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


_log = logging.getLogger(__name__)
LOCAL = "local"  # the name of every client if the service has no keys
_MAKE = "make it with megatron-vlm serve --add-client NAME FILE"
_LINE = re.compile(r"([A-Za-z0-9._-]{1,64}) +([0-9a-f]{64})")


class ApiKeys:
    """The keys of a file. The file is read again when it changes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._stamp: tuple[int, int, int] | None = None
        self._names: dict[str, bytes] = {}
        # Tokens end with this process; clients then get others for their keys.
        self._secret = secrets.token_bytes(32)
        self.names()

    def names(self) -> dict[str, bytes]:
        """Return the digest of each name's key."""
        with self._lock:
            try:
                status = self._path.stat()
                stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
                if stamp != self._stamp:
                    self._names = _read(self._path.read_text(encoding="utf-8"), self._path)
                    self._stamp = stamp
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(
                    f"cannot be read ({error})",
                    key="serve.keys",
                    found=str(self._path),
                    remedy=_MAKE,
                ) from error
            return self._names

    def name_of(self, key: str) -> str | None:
        """Return the name that the key belongs to, or None. The key is compared with every digest,
        each in constant time, so that the duration does not reveal how much of it was right."""
        digest, owner = hashlib.sha256(key.encode()).digest(), None
        for name, known in self.names().items():
            if hmac.compare_digest(digest, known):
                owner = name
        return owner

    def issue_token(self, name: str) -> str:
        """Return a token in place of the key of this name. A new key of the name ends it."""
        return issue_token(name, self._token_secret(self.names()[name]))

    def name_of_token(self, token: str) -> str | None:
        """Return the name that a valid token belongs to, or None."""
        name = claimed_name(token) or ""
        digest = self.names().get(name)
        if digest is None or not is_valid(token, self._token_secret(digest)):
            return None
        return name

    def _token_secret(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, hashlib.sha256)


def add_key(name: str, path: Path) -> str:
    """Make a key for `name` and return it. A former key of this name becomes invalid. Only the
    digest is written, so the key cannot be read again later."""
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name) or name == LOCAL:
        raise ConfigError(
            key="--add-client NAME",
            found=name,
            allowed=f"1 to 64 letters, digits, '.', '_' or '-', other than {LOCAL}",
        )
    known = _read(path.read_text(encoding="utf-8"), path) if path.exists() else {}
    key = "tml-" + secrets.token_urlsafe(32)
    known[name] = hashlib.sha256(key.encode()).digest()
    new = path.with_name(path.name + ".new")
    try:
        new.unlink(missing_ok=True)
        handle = os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.writelines(f"{name} {digest.hex()}\n" for name, digest in known.items())
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError as error:
        raise ConfigError(
            f"cannot be written ({error.strerror})",
            key="--add-client FILE",
            found=str(path),
            allowed="a file in a folder of yours",
        ) from error
    return key


def key_of(request: Request, keys: ApiKeys | None) -> str:
    """Return the name of the request's key, or of a token in its place."""
    if keys is None:
        return LOCAL
    key = sent_key(request)
    is_token = looks_like_token(key)
    try:
        name = keys.name_of_token(key) if is_token else keys.name_of(key)
    except ConfigError as error:
        _log.error("%s", error)
        raise HttpError(503, "the server's file of keys cannot be read at the moment") from error
    if name is None and is_token:
        raise HttpError(
            401,
            "the token has expired or is not of this server; get another from auth/token",
            WWW_Authenticate='Bearer error="invalid_token"',
        )
    if name is None:
        raise HttpError(
            401,
            "no such API key; set TINKER_API_KEY to one that this server's file of keys knows",
            WWW_Authenticate='Basic realm="megatron-vlm", charset="UTF-8"',
        )
    return name


def sent_key(request: Request) -> str:
    """Return the key or token of a request, or an empty text. It is in X-API-Key, a bearer token or
    the password of basic authentication."""
    return request.headers.get("x-api-key") or _authorization(request) or ""


def _authorization(request: Request) -> str | None:
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() != "basic":
        return None
    try:
        return base64.b64decode(value, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return None


def _read(text: str, path: Path) -> dict[str, bytes]:
    digests: dict[str, bytes] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None or match[1] in digests or match[1] == LOCAL:
            raise ConfigError(
                f"must be NAME SHA256, with each name once and none of them {LOCAL}",
                place=f"{path} line {number}",
                remedy=_MAKE,
            )
        digests[match[1]] = bytes.fromhex(match[2])
    return digests
