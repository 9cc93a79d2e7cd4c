"""An engine without a model, for tests of the code around an engine. It is started like the real
one, after its own path: `python fake_engine.py SERVE SOCKET BUFFER`, and uses the same link as
SERVE.

The ids of an answer are its seed, the engine's version and its process id. The log-prob is the
number of the weights that the engine got last, combined with those of the adapter that the request
names. With the option `vocab` the ids lie in the vocabulary: one from the seed, and three from that
number. With the option `experts`, their number and that of a token, the answers have the experts of
`experts_of`; the option `fault` spoils them. The file `asked` gets a line for each request.

The first id of a prompt selects the answer. For HELD it comes once the file `release` of the
options exists, and its first tokens are those of the weights that the engine had before. A streamed
request is told the first one at once, and the second one when another such request comes. For SLOW
it comes after a while. For DEADLY the engine dies; for DEADLY_ONCE it dies only the first time. If
the environment variable REPLAYS is set to a folder, the answers come from there: see
tests/commands/test_agree_command.py. The environment variable STAND_IN_OPTIONS has further options,
as JSON.
"""

import array
import hashlib
import json
import mmap
import os
import queue
import sys
import time
from pathlib import Path
from typing import Any

HELD, DEADLY, DEADLY_ONCE, SLOW = 11, 12, 13, 14
SLOW_S = 0.3
REPLAYS = "STAND_IN_REPLAYS"
OPTIONS = "STAND_IN_OPTIONS"


def number_of(values: bytes, before: int = 0) -> int:
    """Return the number of weights: that of the weights before, combined with the next values."""
    return int(hashlib.sha1(before.to_bytes(4) + values).hexdigest()[:8], 16)


def ids_of(number: int, vocab: int) -> list[int]:
    """Return three ids of a vocabulary that identify the weights."""
    return [number // vocab**place % vocab for place in range(3)]


def experts_of(token: int, position: int, layer: int, experts: int, top_k: int) -> list[int]:
    """Return the experts of a token in a hidden layer."""
    return [(token + 3 * position + 5 * layer + place) % experts for place in range(top_k)]


def contents(folder: str) -> bytes:
    """Return the weights of a folder, or the folder's name if it has none."""
    files = sorted(Path(folder).glob("*.safetensors"))
    return b"".join(file.read_bytes() for file in files) or folder.encode()


def replay_of(prompt: list[int]) -> str:
    """Return the name of the file with the answers to a prompt: {"inspect": ..., "sample": ...}.
    The file of the same name with .bin has the patches."""
    return hashlib.sha1(json.dumps(prompt).encode()).hexdigest()


def shared_file(handle: str) -> mmap.mmap:
    """Return memory of a stand-in of a GPU: a file of the trainer, by its path."""
    with open(bytes.fromhex(handle), "r+b") as file:
        return mmap.mmap(file.fileno(), 0)


class StandIn:
    def __init__(self, link: Any, buffer_file: int) -> None:
        self.link, self.version, self.number, self.first = link, 0, 0, ""
        self.held: list[dict[str, Any]] = []
        self.slow: list[tuple[float, dict[str, Any]]] = []
        self.options: dict[str, Any] = {}
        self.scores = 0
        self.memory, self.arriving = mmap.mmap(buffer_file, 0), None
        self.layers: list[int] = []
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        link.listen(self.inbox.put)

    def run(self) -> None:
        while True:
            try:
                message, _ = self.inbox.get(timeout=0.01)
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
        if do in ("start_weights", "folder", "adapt"):
            self.interrupt()
        if do == "load":
            self.first, self.layers = message["folder"], message["routing_layers"]
            if self.load(**message["options"]):
                self.link.answer(number, self.options.get("gpus", []))
            else:
                self.link.refuse(number, self.options["fail"])
            return
        elif do in ("sample", "score"):
            self.sample(message)
            return
        elif do == "abort":
            self.held = [each for each in self.held if each["id"] != number]
            return
        elif do == "piece":
            self.piece(number, message["parts"])
            return
        elif do == "start_weights":
            memory = shared_file(message["handle"]) if "handle" in message else self.memory
            self.number, self.arriving = 0, TensorAssembly(memory, bytearray)
        elif do in ("folder", "adapt"):
            self.number = self.number_in(message["folder"], self.number * (do == "adapt"))
        self.version = message.get("version", self.version)
        self.link.answer(number, None)

    def interrupt(self) -> None:
        for each in self.held:
            each["former"].append((self.version, self.number))

    def piece(self, number: int, parts: list[dict[str, Any]]) -> None:
        for about, values in self.arriving.take(parts):
            if about["name"] == self.options.get("refused"):
                self.link.refuse(number, "ValueError: no such tensor")
                return
            self.number = number_of(bytes(values), self.number)
        self.link.answer(number, None)

    def number_in(self, folder: str, before: int) -> int:
        """Return the number of the weights in a folder; those that it was started with have number
        0."""
        return 0 if folder == self.first else number_of(contents(folder), before)

    def load(self, **options: Any) -> bool:
        """Return whether the engine has started."""
        self.options = options = {**options, **json.loads(os.environ.get(OPTIONS, "{}"))}
        if "stumble" in options and Path(options["stumble"]).exists():
            Path(options["stumble"]).unlink()
            os._exit(4)
        while "loads" in options and not Path(options["loads"]).exists():
            time.sleep(0.01)
        return "fail" not in options

    def sample(self, message: dict[str, Any]) -> None:
        if message["do"] == "score" and self.dies():
            os._exit(3)
        if "asked" in self.options:
            with Path(self.options["asked"]).open("a") as file:
                print(json.dumps([message["prompt"], message.get("adapter")]), file=file)
        kind = message["prompt"][0]
        if kind == DEADLY or (kind == DEADLY_ONCE and self.is_first_death()):
            print("the prompt was too much", flush=True)
            os._exit(3)
        if kind == SLOW:
            self.slow.append((time.monotonic() + SLOW_S, message))
        elif kind == HELD:
            self.held.append({**message, "former": []})
            if message.get("streamed"):
                self.tell()
        else:
            self.answer(message)

    def tell(self) -> None:
        """Tell each held request that is streamed of its next token."""
        for each in self.held:
            if each.get("streamed"):
                told = each["told"] = each.get("told", -1) + 1
                pieces = [[told, [seed % self.options["vocab"] + told]] for seed in each["seeds"]]
                self.link.tell(each["id"], pieces)

    def dies(self) -> bool:
        """Return whether the engine dies at this score: at one in `lives`, until `once` exists."""
        self.scores += 1
        return self.scores == self.options.get("lives") and self.is_first_death()

    def is_first_death(self) -> bool:
        """Return whether no engine has died yet that has the same file `once`. Without this option
        it is always true."""
        if "once" not in self.options:
            return True
        once = Path(self.options["once"])
        is_first = not once.exists()
        once.parent.mkdir(exist_ok=True)
        once.touch()
        return is_first

    def answer(self, message: dict[str, Any]) -> None:
        if message["do"] == "score":
            self.score(message)
            return
        number = self.number
        if adapter := message.get("adapter"):
            number = self.number_in(adapter, number)
        former, vocab = message.get("former", []), self.options.get("vocab")
        rest = [self.version, (4 if vocab else 3) - len(former)]
        one = {
            "ended": "stop",
            "accepted": [],
            "versions": [*([version, 1] for version, _ in former), rest],
        }
        one["log_probs"] = [*(float(before) for _, before in former), float(number)]
        samples = [{**one, "ids": [seed, self.version, os.getpid()]} for seed in message["seeds"]]
        if vocab:
            one, weights = {**one, "log_probs": [-1.0, -2.0, -3.0, -4.0]}, ids_of(number, vocab)
            samples = [{**one, "ids": [s % vocab, *weights]} for s in message["seeds"]]
        tables = b""
        if "experts" in self.options:
            tables = b"".join(self.table(message, sample) for sample in samples)
        self.link.answer(message["id"], {"samples": samples}, tables)

    def table(self, message: dict[str, Any], sample: dict[str, Any]) -> bytes:
        """Return the experts of the tokens that are asked for, but for the last token of an answer,
        which nothing reads, and write their shape into the sample."""
        fault, start = self.options.get("fault"), message["routing_start"]
        ids = [*message["expected"], *sample["ids"]][:-1]
        layers = self.layers[: -1 if fault == "layer" else None]
        experts, top_k = self.options["experts"]
        places = [(token, position) for position, token in enumerate(ids)][start:]
        rows = [[experts_of(*each, layer, experts, top_k) for layer in layers] for each in places]
        if fault == "expert":
            rows[1][0][0] = experts
        if fault == "tokens":
            rows.pop()
        if fault != "missing":
            sample["routing"] = [len(rows), len(layers), top_k]
        numbers = [expert for row in rows for chosen in row for expert in chosen]
        return array.array("h", numbers).tobytes()

    def score(self, message: dict[str, Any]) -> None:
        """Answer with the ids of the prompt, and with log-probs that are their negatives."""
        table = array.array("d")
        for token in message["expected"]:
            for other in range(1 + message["top_k"]):
                table.extend((token + other, -token - other))
        self.link.answer(message["id"], {}, table.tobytes())


if __name__ == "__main__":
    server = Path(sys.argv[1])
    sys.path += [str(server.parent), str(server.parents[2] / "io")]
    from parent import ParentChannel
    from weight_pieces import TensorAssembly

    StandIn(ParentChannel(int(sys.argv[2])), int(sys.argv[3])).run()
