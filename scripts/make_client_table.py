"""Write the table of programs and features into docs/serve-chats.md (make chat-env vllm-env):

    python scripts/make_client_table.py

Each feature of tests/support/chat_clients/features.py runs on `megatron-vlm serve` and on vLLM's
own server, with the same tiny model, which has learned the answers.
"""

import base64
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from record_versions import with_section  # noqa: E402

from megatron_vlm.commands.bench.model_server import BenchModel, BenchSettings, served_model  # noqa: E402
from megatron_vlm.commands.demo.tiny_model import write_tiny  # noqa: E402
from megatron_vlm.family.tiny import TinySpec  # noqa: E402
from megatron_vlm.serve.journal.journal_records import plain_name  # noqa: E402
from tests.support.pool import free_port  # noqa: E402
from tests.support.serve_client import Client, served  # noqa: E402
from tests.support.serve_requests import picture  # noqa: E402
from tests.support.taught import teach  # noqa: E402

PAGE = ROOT / "docs" / "serve-chats.md"
FEATURES = ROOT / "tests" / "support" / "chat_clients" / "features.py"
THEIR_WORDS = (
    "--max-model-len 4096 --enforce-eager --dtype float32 --skip-mm-profiling "
    "--enable-auto-tool-choice --tool-call-parser hermes"
)
NEAR = 1e-4  # difference of log-probs in fp32
SCHEMA = {
    "type": "object",
    "properties": {"side": {"type": "string", "enum": ["left"]}},
    "required": ["side"],
    "additionalProperties": False,
}
LOOK = {"name": "look", "description": "Look at a side.", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": LOOK}]
CALL = {"name": "look", "arguments": '{"side": "left"}'}
FORM = {"name": "answer", "schema": SCHEMA, "strict": True}


def asked(user: object, *more: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    """Return the body of a chat."""
    head = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": user}]
    return {"messages": [*head, *more], **fields}


def questions() -> dict[str, tuple[dict[str, Any], str]]:
    """Return the body of each feature, and the answer that the model learns."""
    data = base64.b64encode(picture(64, 64, 1).data).decode()
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    call = {"id": "a", "type": "function", "function": CALL}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "a", "content": "red"}
    drawn = {"temperature": 1, "seed": 5, "n": 3}
    plain = asked("What is red?")
    form = {"type": "json_schema", "json_schema": FORM}
    said = '<tool_call>\n{"name": "look", "arguments": {"side": "left"}}\n</tool_call>'
    return {
        "chat": (plain, "A colour."),
        "picture": (asked([{"type": "text", "text": "What is red?"}, image]), "The circle."),
        "call of a tool": (asked("Look.", tools=TOOLS, tool_choice="required"), said),
        "result of a tool": (asked("Look.", called, result, tools=TOOLS), "It is red."),
        "JSON schema": (asked("Which side?", response_format=form), '{"side": "left"}'),
        "log-probs": (plain | {"logprobs": True, "top_logprobs": 2}, "A colour."),
        "several answers": (plain | drawn, "A colour."),
        "continued answer": (
            asked("What is red?", {"role": "assistant", "content": "It is"}),
            " a colour.",
        ),
    }


def write_taught(folder: Path) -> str:
    """Write a tiny model that knows the answers, and return its folder."""
    tiny = folder / "tiny"
    spec = TinySpec(layers=2, deepstack=1, vision_depth=1, head_dim=32, from_scratch=True)
    write_tiny(tiny, spec)
    chats = [
        ({n: b[n] for n in b if n in ("messages", "tools")}, said)
        for b, said in questions().values()
    ]
    with (
        served(str(tiny), folder / "lessons", free_port()) as service,
        Client(service.url, str(tiny)) as client,
    ):
        teach(client, chats).save_external("taught")
    [made] = {each.parent for each in (folder / "lessons").rglob("config.json")}
    return str(made)


Found = Mapping[str, Mapping[str, Any]]


def try_programs(url: str, name: str, key: str, folder: Path) -> Found:
    """Return the value of each feature of each program on a server."""
    file = folder / "bodies.json"
    file.write_text(json.dumps({feature: body for feature, (body, _) in questions().items()}))
    done = subprocess.run(
        [ROOT / ".venv-chat" / "bin" / "python", FEATURES, url, name, key, file],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": "", "HOME": str(folder)},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        sys.exit(done.stderr)
    found: Found = json.loads(done.stdout.splitlines()[-1])
    return found


def try_servers(model: str, folder: Path) -> tuple[Found, Found]:
    """Return what `megatron-vlm serve` and vLLM's own server give."""
    name, python = plain_name(model), str(ROOT / ".venv-vllm" / "bin" / "python")
    settings = BenchSettings((), python, THEIR_WORDS.split(), None, "", [], None, None, 1)
    with served(model, folder / "run", free_port()) as service:
        ours = try_programs(service.url, name, "any", folder)
    with served_model(settings, BenchModel(name, model), folder / "log.txt") as server:
        return ours, try_programs(server.url, name, server.key, folder)


def is_same(one: Any, other: Any) -> bool:
    """Return whether two values are equal, log-probs up to their last digits."""
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) < NEAR
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return all(map(is_same, one, other))
    return bool(one == other)


def rows(ours: Found, theirs: Found) -> Iterator[list[str]]:
    """Yield the table: its head, and a row for each feature."""
    yield ["feature", *ours]
    for feature in dict.fromkeys(each for features in ours.values() for each in features):
        expected = next(found[feature] for found in ours.values() if feature in found)
        cells = []
        for program, found in ours.items():
            if feature not in found:
                cells.append("")
            elif "failed" in str(found[feature]) or not is_same(found[feature], expected):
                cells.append("**no**")
            else:
                cells.append("=" if is_same(found[feature], theirs[program][feature]) else "yes")
        yield [feature, *cells]


def with_table(page: str) -> str:
    """Return the page with the table of what the programs have found."""
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = try_servers(write_taught(Path(folder)), Path(folder))
    lines = [f"| {' | '.join(row)} |" for row in rows(ours, theirs)]
    lines.insert(1, "|---" * (len(ours) + 1) + "|")
    return with_section(page, "clients", "\n" + "\n".join(lines) + "\n\n")


def main() -> int:
    """Rewrite the table."""
    PAGE.write_text(with_table(PAGE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
