"""Agent programs for tests, as users write them: with Python's standard library alone.

    python agent_program.py KIND

The kinds are the functions below."""

import base64
import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

Json = dict[str, Any]


# All names of the environment that a program has; Python itself adds LC_CTYPE.
VARIABLES = {
    *("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "REWARD_URL"),
    *("PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH"),
    *(f"{api}_{n}" for api in ("OPENAI", "ANTHROPIC") for n in ("BASE_URL", "API_KEY", "MODEL")),
}


def post(url: str, body: Any) -> Any:
    head = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), head)
    try:
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        print(error.read().decode(), file=sys.stderr)
        raise


def ask(messages: list[Json], **more: Any) -> Json:
    """Return the answer of the model, with its tokens."""
    body = {"model": "policy", "messages": messages, "return_token_ids": True, **more}
    return post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)


def text_of(answer: Json) -> str:
    return str(answer["choices"][0]["message"]["content"])


def said(answer: Json) -> Json:
    """Return an answer as a message, as it came."""
    return dict(answer["choices"][0]["message"])


def grey(value: int) -> Json:
    """Return a grey picture of 64 x 64 pixels, as a part of a message."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        size, check = len(data).to_bytes(4, "big"), zlib.crc32(kind + data).to_bytes(4, "big")
        return size + kind + data + check

    head = (64).to_bytes(4, "big") * 2 + bytes([8, 0, 0, 0, 0])
    rows = zlib.compress((b"\0" + bytes([value]) * 64) * 64)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    url = "data:image/png;base64," + base64.b64encode(png).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def user(*parts: Json | str) -> Json:
    content = [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]
    return {"role": "user", "content": content}


def reward(value: float, **figures: float) -> None:
    post(os.environ["REWARD_URL"], {"reward": value, **figures})


def two_turns(record: Json) -> None:
    """Ask twice; the second turn has a picture of its own."""
    first = ask(record["messages"])
    messages = [*record["messages"], said(first), user(grey(99), "again?")]
    second = ask(messages)
    reward(len(text_of(second)) % 5, turns=2)


def compaction(record: Json) -> None:
    """Go on without the first turn, and return to the whole conversation."""
    first = ask(record["messages"])
    ask([user(grey(99), "in short: " + text_of(first))])
    ask([*record["messages"], said(first), user("and?")])
    print(json.dumps({"reward": 2}))


def parallel(record: Json) -> None:
    """Ask the same twice at a time, then continue one of the answers."""
    answers: list[Json] = []

    def one() -> None:
        answers.append(ask(record["messages"]))

    threads = [threading.Thread(target=one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ask([*record["messages"], said(answers[1]), user("and?")])
    reward(1)


def sends_back(record: Json) -> None:
    """Ask with a tool, and send the answer back as it came, with the results of its calls. Its
    tokens are those that were drawn."""
    function = {"name": "look", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": function}]
    first = ask(record["messages"], tools=tools)
    message = said(first)
    calls = [each["id"] for each in message.get("tool_calls", [])]
    results = [{"role": "tool", "tool_call_id": each, "content": "3"} for each in calls]
    follows = results or [user("and?")]
    second = ask([*record["messages"], message, *follows], tools=tools)
    begins = [*first["prompt_token_ids"], *first["choices"][0]["token_ids"]]
    reward(second["prompt_token_ids"][: len(begins)] == begins)


def changes(record: Json) -> None:
    """Send an answer back with more words than it had."""
    message = said(ask(record["messages"]))
    message["content"] += "!"
    ask([*record["messages"], message, user("and?")])
    reward(1)


def sub_agents(record: Json) -> None:
    """Ask for three answers at a time, each with words of its own, and then for their sum."""
    parts: list[str] = []

    def one(number: int) -> None:
        parts.append(text_of(ask([user(grey(number), f"part {number}")])))

    threads = [threading.Thread(target=one, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ask([*record["messages"], user(*sorted(parts))])
    reward(1)


def anthropic(record: Json) -> None:
    """Ask at Anthropic's address, with a picture in the result of a tool."""
    source = {"type": "base64", "media_type": "image/png"}
    data = grey(7)["image_url"]["url"].partition(",")[2]
    picture = {"type": "image", "source": {**source, "data": data}}
    call = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [picture]}
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    body = {"model": "policy", "max_tokens": 10**6, "messages": messages}  # beyond any row
    post(os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", body)
    reward(3)


def judged(record: Json) -> None:
    """Leave the reward to rl.reward."""
    ask(record["messages"])
    print("42")


def refused(record: Json) -> None:
    """Ask for what is refused, and print the answers' statuses."""
    statuses = []
    for body in (
        {"model": "gpt-4o", "messages": record["messages"]},
        {"model": "policy", "messages": [user({"type": "image_url", "image_url": "/etc/a.png"})]},
        {"model": "policy", "messages": [user({"type": "image_url", "image_url": "http://a/b"})]},
        {"model": "policy", "messages": record["messages"], "top_logprobs": 2, "logprobs": True},
    ):
        try:
            post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
        except urllib.error.HTTPError as error:
            statuses.append(error.code)
    ask(record["messages"])
    reward(1)
    for late in (lambda: ask(record["messages"]), lambda: reward(2)):
        try:
            late()
        except urllib.error.HTTPError as error:
            statuses.append(error.code)
    if statuses != [404, 400, 400, 400, 410, 409] or "SECRET" in os.environ:
        sys.exit(f"statuses {statuses}")


def spies(record: Json) -> None:
    """Look for what is not the program's own, and write down all that it is told."""
    base, told = os.environ["OPENAI_BASE_URL"], [json.dumps(record)]
    server, _, key = base.removesuffix("/v1").rpartition("/e/")

    def hear(url: str, *body: bytes) -> int:
        try:
            with urllib.request.urlopen(url, *body) as answer:
                told.append(answer.read().decode())
                return int(answer.status)
        except urllib.error.HTTPError as error:
            told.append(error.read().decode())
            return error.code

    elsewhere = ["/", "/healthz", "/metrics", "/docs", "/v1/models", "/api/v1/healthz"]
    elsewhere += [f"/e/{'x' * 32}/v1/models", f"/e/{key}/v1/../../../healthz", f"/e/{key}/api/v1"]
    wrong_statuses = {hear(server + path) for path in elsewhere} - {404, 410}
    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    for fields in (
        {"messages": [user(broken)]},
        {"messages": [{"role": "narrator", "content": "x"}]},
        {"messages": [{"role": "tool", "content": [{}]}]},
        {"tools": [{"type": "function", "function": {"parameters": 7}}]},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "x"}}}},
        {"chat_template_kwargs": {"messages": 1}},
        {"stop": ["x"] * 65},
    ):
        body = {"model": "policy", "messages": record["messages"], **fields}
        wrong_statuses |= {hear(base + "/chat/completions", json.dumps(body).encode())} - {200, 400}
    wrong_statuses |= {hear(base + "/chat/completions", b"[")} - {400}
    Path(sys.argv[2]).write_text("\n".join(told))
    reward(not wrong_statuses and os.environ.keys() <= VARIABLES)


def shows(record: Json) -> None:
    """Write down what is said where a request fails."""
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    try:
        body = json.dumps({"model": "policy", "messages": record["messages"]})
        urllib.request.urlopen(url, body.encode())
    except urllib.error.HTTPError as error:
        Path(sys.argv[2]).write_text(f"{error.code} {error.read().decode()}")


def crowds(record: Json) -> None:
    """Ask 32 times at a time, and count the answers."""
    answers: list[Json] = []

    def one() -> None:
        with suppress(urllib.error.HTTPError):
            answers.append(ask(record["messages"]))

    threads = [threading.Thread(target=one) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reward(len(answers))


def many(record: Json) -> None:
    while True:
        ask(record["messages"])


def hangs(record: Json) -> None:
    child = [sys.executable, "-c", "import time; time.sleep(999)", os.environ["REWARD_URL"]]
    subprocess.Popen(child)
    time.sleep(999)


def exits(record: Json) -> None:
    ask(record["messages"])
    sys.exit("no tool today")


def outlives(record: Json) -> None:
    """Leave a child in a session of its own, which asks once this episode has ended. The next
    episode waits for the answer, and is rewarded with its status."""
    mark = Path(sys.argv[2])
    if not mark.with_suffix(".begun").exists():
        mark.with_suffix(".begun").touch()
        child = [sys.executable, __file__, "late", str(mark)]
        quiet = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.Popen(child, start_new_session=True, **quiet)
        reward(0)
        return
    while not mark.exists():
        time.sleep(0.02)
    reward(float(mark.read_text()))


def late(record: Json) -> None:
    """Wait until the episode has ended, then ask, and write down the status of the refusal."""
    try:
        while True:
            with urllib.request.urlopen(os.environ["OPENAI_BASE_URL"] + "/models"):
                time.sleep(0.02)
    except urllib.error.HTTPError:
        pass
    try:
        ask([user("still there?")])
    except urllib.error.HTTPError as error:
        part = Path(sys.argv[2]).with_suffix(".part")
        part.write_text(str(error.code))
        part.rename(sys.argv[2])


def silent(record: Json) -> None:
    ask(record["messages"])


def pictures(record: Json) -> None:
    ask([user(*(grey(each) for each in range(99)))])


def other_model(record: Json) -> None:
    ask(record["messages"], model="gpt-4o")


def floods(record: Json) -> None:
    for _ in range(300):
        print("x" * 9999, file=sys.stderr)
        print("x" * 9999)
    ask(record["messages"])
    print(json.dumps({"reward": "much"}))


if __name__ == "__main__":
    globals()[sys.argv[1]](json.loads(sys.stdin.read() or "{}"))
