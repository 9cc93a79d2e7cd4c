"""An engine without a model, for tests of what surrounds one. It is started as the real one is,
after its own path: `python fake_engine.py SERVE SOCKET BUFFER`, and uses the link beside SERVE.

An answer's ids are its seed, the engine's version and its process, its log-prob the number of the
weights that it was given last, and with them of the adapter that it names. With the option `vocab`
they are ids of it: of the seed, and three of that number. The file `asked` gets a line for each
request.

What a prompt begins with says how it is answered: HELD, once the file `release` of its options
exists; SLOW, after a while; DEADLY, by dying; DEADLY_ONCE, by dying if nobody has died of it
before. Where the environment has REPLAYS, a folder, it has the answers: see
tests/test_agree_command.py.
"""

import hashlib
import json
import os
import queue
import sys
import time
from pathlib import Path
from typing import Any

HELD, DEADLY, DEADLY_ONCE, SLOW = 11, 12, 13, 14
SLOW_S = 0.3
REPLAYS = "STAND_IN_REPLAYS"


def number_of(values: bytes, before: int = 0) -> int:
    """Of weights, the next of which are these."""
    return int(hashlib.sha1(before.to_bytes(4) + values).hexdigest()[:8], 16)


def ids_of(number: int, vocab: int) -> list[int]:
    """Three ids of a vocabulary, by which weights are told apart."""
    return [number // vocab**place % vocab for place in range(3)]


def contents(folder: str) -> bytes:
    """Of its weights; where it has none, its name."""
    files = sorted(Path(folder).glob("*.safetensors"))
    return b"".join(file.read_bytes() for file in files) or folder.encode()


def replay_of(prompt: list[int]) -> str:
    """The name of the file that has what is answered to a prompt: {"inspect": ..., "sample": ...};
    behind it with .bin, the patches."""
    return hashlib.sha1(json.dumps(prompt).encode()).hexdigest()


class StandIn:
    def __init__(self, link: Any) -> None:
        self.link, self.version, self.number, self.first = link, 0, 0, ""
        self.held: list[dict[str, Any]] = []
        self.slow: list[tuple[float, dict[str, Any]]] = []
        self.options: dict[str, Any] = {}

    def run(self) -> None:
        while True:
            try:
                message, _ = self.link.inbox.get(timeout=0.01)
                known = REPLAYS in os.environ and message["do"] in ("inspect", "sample")
                (self.replay if known else self.handle)(message)
            except queue.Empty:
                pass
            while self.slow and self.slow[0][0] < time.monotonic():
                self.answer(self.slow.pop(0)[1])
            if self.held and Path(self.options["release"]).exists():
                while self.held:
                    self.answer(self.held.pop(0))

    def replay(self, message: dict[str, Any]) -> None:
        file = Path(os.environ[REPLAYS]) / replay_of(message["prompt"])
        body = Path(f"{file}.bin").read_bytes() if message["do"] == "inspect" else b""
        self.link.answer(message["id"], json.loads(file.read_text())[message["do"]], body)

    def handle(self, message: dict[str, Any]) -> None:
        number, do = message["id"], message["do"]
        if do == "load":
            self.first = message["folder"]
            if not self.load(**message["options"]):
                self.link.refuse(number, self.options["fail"])
                return
        elif do == "sample":
            self.sample(message)
            return
        elif do == "abort":
            self.held = [each for each in self.held if each["id"] != number]
            return
        elif self.held:
            self.link.refuse(number, "AssertionError: an update comes when nothing is asked")
            return
        elif do == "stream_weights":
            self.number = 0
            while (found := self.link.next_tensor()) is not None:
                if found[0]["name"] == self.options.get("refused"):
                    self.link.refuse(number, "ValueError: no such tensor")
                    return
                self.number = number_of(bytes(found[1]), self.number)
        elif do in ("folder", "adapt"):
            self.number = self.number_in(message["folder"], self.number * (do == "adapt"))
        self.version = message.get("version", self.version)
        self.link.answer(number, None)

    def number_in(self, folder: str, before: int) -> int:
        """Of the weights there: 0 of those that it began with."""
        return 0 if folder == self.first else number_of(contents(folder), before)

    def load(self, **options: Any) -> bool:
        """Whether it has started."""
        self.options = options
        if (stumble := Path(options.get("stumble", "/nowhere"))).exists():
            stumble.unlink()
            os._exit(4)
        while "loads" in options and not Path(options["loads"]).exists():
            time.sleep(0.01)
        return "fail" not in options

    def sample(self, message: dict[str, Any]) -> None:
        if "asked" in self.options:
            with Path(self.options["asked"]).open("a") as file:
                print(json.dumps([message["prompt"], message.get("adapter")]), file=file)
        kind = message["prompt"][0]
        once = Path(self.options.get("once", "/nowhere"))
        if kind == DEADLY or (kind == DEADLY_ONCE and not once.exists()):
            print("the prompt was too much", flush=True)
            once.parent.mkdir(exist_ok=True)
            once.touch()
            os._exit(3)
        if kind == SLOW:
            self.slow.append((time.monotonic() + SLOW_S, message))
        elif kind == HELD:
            self.held.append(message)
        else:
            self.answer(message)

    def answer(self, message: dict[str, Any]) -> None:
        number, ended = self.number, {"ended": "stop"}
        if adapter := message.get("adapter"):
            number = self.number_in(adapter, number)
        one = {**ended, "log_probs": [float(number)]}
        samples = [{**one, "ids": [seed, self.version, os.getpid()]} for seed in message["seeds"]]
        if vocab := self.options.get("vocab"):
            one, weights = {**ended, "log_probs": [-1.0, -2.0, -3.0, -4.0]}, ids_of(number, vocab)
            samples = [{**one, "ids": [s % vocab, *weights]} for s in message["seeds"]]
        self.link.answer(message["id"], {"samples": samples, "version": self.version})


if __name__ == "__main__":
    sys.path.insert(0, str(Path(sys.argv[1]).parent))
    from channel import ParentChannel

    StandIn(ParentChannel(int(sys.argv[2]), int(sys.argv[3]))).run()
