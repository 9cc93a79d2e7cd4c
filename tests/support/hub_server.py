"""A server that speaks the API of the Hugging Face Hub, for the real client. It has repositories
with branches and commits, downloads, commits with regular and large files, tokens and gates."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

LARGE = 10_000  # bytes; a file of at least this size travels as the large files of the Hub do


@dataclass
class Repo:
    """A repository: files by path by commit; branches are names of commits."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    private: bool = False
    gated: bool = False

    def commit(self, files: dict[str, bytes], message: str = "", branch: str = "main") -> str:
        sha = hashlib.sha1(repr((len(self.commits), sorted(files))).encode()).hexdigest()
        self.commits[sha], self.branches[branch] = dict(files), sha
        self.messages.append(message)
        return sha

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[self.branches["main"]]


class HubServer:
    """The state of the server: `repos` by kind and name, e.g. models/ORG/NAME; `requests` as METHOD
    PATH."""

    def __init__(self, address: str):
        self.address = address
        self.repos: dict[str, Repo] = {}
        self.tokens = {"hf_writer": "write", "hf_reader": "read"}  # tokens of the user somebody
        self.blobs: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.refused: dict[str, int] = {}  # status by beginning of METHOD PATH

    def model(self, name: str, folder: str | Path) -> Repo:
        files = {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}
        repo = self.repos[f"models/{name}"] = Repo()
        repo.commit(files)
        return repo

    def downloads(self) -> list[str]:
        return [text.split("/")[-1] for text in self.requests if text.startswith("GET /some")]

    def environment(self, home: Path, token: str | None = None, **more: str) -> dict[str, str]:
        """Return the variables that make the client use this server alone, with a cache of its
        own."""
        variables = {} if token is None else {"HF_TOKEN": token}
        return {
            "HF_ENDPOINT": self.address,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",  # its uploads use a service with another protocol
            "HF_HUB_DISABLE_TELEMETRY": "1",
            **variables,
            **more,
        }


@contextmanager
def hub_server() -> Iterator[HubServer]:
    """Run a server on loopback."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Answers)
    server.daemon_threads = True
    server.hub = HubServer(f"http://127.0.0.1:{server.server_address[1]}")  # type: ignore
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server.hub  # type: ignore
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    do_GET = do_POST = do_PUT = do_HEAD

    def _answer(self) -> None:
        hub: HubServer = self.server.hub  # type: ignore
        self.hub, self.body = hub, self._read()
        path = unquote(urlsplit(self.path).path)
        hub.requests.append(f"{self.command} {path}")
        for start, status in hub.refused.items():
            if hub.requests[-1].startswith(start):
                self._say(status, {"error": "refused"})
                return
        parts = path.strip("/").split("/")
        if parts[0] == "lfs":
            hub.blobs[parts[1]] = self.body
            self._say(200, {})
        elif path == "/api/whoami-v2":
            self._whoami()
        elif path == "/api/validate-yaml":  # for a model card before its commit
            head = json.loads(self.body)["content"].split("---\n")[1]
            assert yaml.safe_load(head)["pipeline_tag"] == "image-text-to-text"
            self._say(200, {"errors": [], "warnings": []})
        elif path == "/api/repos/create":
            self._create(json.loads(self.body))
        elif parts[0] == "api":
            self._api("/".join(parts[1:4]), parts[4:])
        elif path.endswith(".git/info/lfs/objects/batch"):
            self._batch(json.loads(self.body))
        else:
            kind = "datasets" if parts[0] == "datasets" else "models"
            self._resolve(kind, parts[1:] if kind == "datasets" else parts)

    def _read(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _say(self, status: int, content: Any, **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    @property
    def role(self) -> str | None:
        return self.hub.tokens.get(self.headers.get("Authorization", "").removeprefix("Bearer "))

    def _repo(self, key: str) -> Repo | None:
        repo = self.hub.repos.get(key)
        if repo is None or (repo.private and self.role is None):
            self._say(404 if self.role else 401, {"error": "no"}, X_Error_Code="RepoNotFound")
            return None
        return repo

    def _commit_of(self, repo: Repo, revision: str) -> str | None:
        sha = repo.branches.get(revision, revision)
        if sha not in repo.commits:
            self._say(404, {"error": "no"}, X_Error_Code="RevisionNotFound")
            return None
        return sha

    def _whoami(self) -> None:
        if self.role is None:
            self._say(401, {"error": "Invalid username or password."})
            return
        role, _, scope = self.role.partition(" ")  # e.g. fineGrained repo.write
        token = {"displayName": "test", "role": role}
        if scope:
            token["fineGrained"] = {"scoped": [{"permissions": [scope]}]}
        who = {"type": "user", "name": "somebody", "orgs": [{"name": "some-org"}]}
        self._say(200, {**who, "auth": {"type": "access_token", "accessToken": token}})

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked.get('organization') or 'somebody'}/{asked['name']}"
        if self.role != "write":
            self._say(403, {"error": "You don't have the rights"})
            return
        if exists := f"models/{name}" in self.hub.repos:
            url = f"{self.hub.address}/{name}"
            self._say(409, {"error": "You already created this model repo", "url": url})
        private = asked.get("private", asked.get("visibility") == "private")
        if not exists:
            repo = self.hub.repos[f"models/{name}"] = Repo(private=bool(private))
            repo.commit({".gitattributes": b""}, "initial commit")
            self._say(200, {"url": f"{self.hub.address}/{name}", "name": name})

    def _api(self, key: str, rest: list[str]) -> None:
        if (repo := self._repo(key)) is None:
            return
        action, revision = (rest + ["", ""])[0] or "revision", "/".join(rest[1:2]) or "main"
        if (sha := self._commit_of(repo, revision)) is None:
            return
        files = repo.commits[sha]
        if action == "revision":
            siblings = [{"rfilename": path} for path in files]
            name = key.partition("/")[2]
            self._say(200, {"id": name, "sha": sha, "siblings": siblings, "private": repo.private})
        elif action == "tree":
            self._say(200, [_entry(path, data) for path, data in files.items()])
        elif action == "paths-info":
            is_json = self.body.startswith(b"{")  # a form from other versions of the client
            asked = json.loads(self.body) if is_json else parse_qs(self.body.decode())
            paths = [path for path in asked["paths"] if path in files]
            self._say(200, [_entry(path, files[path]) for path in paths])
        elif self.role != "write":
            self._say(403, {"error": "You don't have the rights"})
        elif action == "preupload":
            self._say(200, {"files": list(map(_mode, json.loads(self.body)["files"]))})
        elif action == "commit":
            self._commit(key.partition("/")[2], repo, dict(files))
        else:
            self._say(404, {"error": f"unknown {action}"})

    def _commit(self, name: str, repo: Repo, files: dict[str, bytes]) -> None:
        message = ""
        for line in map(json.loads, self.body.splitlines()):
            kind, value = line["key"], line["value"]
            if kind == "header":
                message = value["summary"]
            elif kind == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif kind == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]]
            elif kind == "deletedFile":
                del files[value["path"]]
        sha = repo.commit(files, message)
        url = f"{self.hub.address}/{name}/commit/{sha}"
        self._say(200, {"success": True, "commitOid": sha, "commitUrl": url})

    def _batch(self, asked: dict[str, Any]) -> None:
        objects = []
        for item in asked["objects"]:
            upload = {"href": f"{self.hub.address}/lfs/{item['oid']}"}
            exists = item["oid"] in self.hub.blobs
            objects.append({**item, **({} if exists else {"actions": {"upload": upload}})})
        self._say(200, {"transfer": "basic", "objects": objects})

    def _resolve(self, kind: str, parts: list[str]) -> None:
        """Answer a request for .../ORG/NAME/resolve/REVISION/PATH."""
        if (repo := self._repo(f"{kind}/{parts[0]}/{parts[1]}")) is None:
            return
        if repo.gated:
            self._say(403, {"error": "ask"}, X_Error_Code="GatedRepo")
            return
        if (sha := self._commit_of(repo, parts[3])) is None:
            return
        data = repo.commits[sha].get("/".join(parts[4:]))
        if data is None:
            self._say(404, {"error": "no"}, X_Error_Code="EntryNotFound", X_Repo_Commit=sha)
            return
        entry = _entry("", data)
        tag = entry["lfs"]["oid"] if "lfs" in entry else entry["oid"]
        linked = {"X_Linked_ETag": f'"{tag}"', "X_Linked_Size": str(len(data))}
        self._say(200, data, ETag=f'"{tag}"', X_Repo_Commit=sha, **linked)


def _entry(path: str, data: bytes) -> dict[str, Any]:
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": blob}
    if len(data) >= LARGE:
        oid = hashlib.sha256(data).hexdigest()
        entry["lfs"] = {"oid": oid, "size": len(data), "pointerSize": 130}
    return entry


def _mode(file: dict[str, Any]) -> dict[str, Any]:
    mode = "lfs" if file["size"] >= LARGE else "regular"
    return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False}
