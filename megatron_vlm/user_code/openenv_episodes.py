"""Episodes of an OpenEnv server, rl.environment=openenv:URL. Each has a session of its own."""

import base64
import json
from collections.abc import Mapping
from typing import Any

import httpx
from websockets.asyncio.client import connect

from megatron_vlm.user_code.environment import EnvStep, Message

_PICTURES = ("data:image/", "iVBORw0KGgo", "/9j/", "UklGR")  # beginnings: URL, PNG, JPEG, WebP


def load_openenv(url: str) -> type:
    """Return the class of a server's episodes. A record's `reset` has the arguments of its reset,
    such as a seed."""
    schema = httpx.get(f"{url}/schema").raise_for_status().json()["action"]["properties"]
    fields = {name: each.get("type") for name, each in schema.items() if name != "metadata"}

    class OpenEnvEpisode:
        async def reset(self, record: Mapping[str, Any]) -> list[Message]:
            address = f"{url}/ws".replace("http", "ws", 1)
            self.socket = await connect(address, max_size=None, ping_timeout=None)
            seen = await self._ask("reset", record.get("reset", {}))
            prompt = record.get("messages", record.get("prompt", ()))
            said = {"role": "user", "content": prompt}
            return [*([said] if isinstance(prompt, str) else prompt), _message(seen["observation"])]

        async def step(self, answer: str) -> EnvStep:
            text = answer.rpartition("</think>")[2].strip()
            is_text = list(fields.values()) == ["string"]
            action = dict.fromkeys(fields, text) if is_text else json.loads(text)
            seen = await self._ask("step", action)
            more = [] if seen["done"] else [_message(seen["observation"])]
            return EnvStep(float(seen["reward"] or 0), more)

        async def close(self) -> None:
            await self.socket.close()

        async def _ask(self, kind: str, data: Any) -> Any:
            await self.socket.send(json.dumps({"type": kind, "data": data}))
            said = json.loads(await self.socket.recv())
            if said["type"] == "error":
                raise RuntimeError(said["data"])
            return said["data"]

    return OpenEnvEpisode


def _message(observation: Mapping[str, Any]) -> Message:
    """Return the pictures of an observation, and its other fields: JSON, or the only text."""
    rest = {name: value for name, value in observation.items() if name != "metadata"}
    names = [name for name, value in rest.items() if str(value).startswith(_PICTURES)]
    shown = [base64.b64decode(rest.pop(name).rpartition(",")[2]) for name in names]
    texts = [value for value in rest.values() if len(rest) == 1 and isinstance(value, str)]
    text = {"type": "text", "text": texts[0] if texts else json.dumps(rest)}
    return {"role": "user", "content": [*({"type": "image", "image": p} for p in shown), text]}
