"""The adapters that requests name by their folders, whose contents never change.

It needs nothing but Python and, once it is asked, vLLM.
"""

from collections import OrderedDict
from typing import Any

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM makes room for
KNOWN = 1024  # folders, before the one that was asked for longest ago is forgotten


class NamedAdapters:
    """vLLM knows an adapter by a name and a number of ours, neither of which is used twice: what it
    keeps of one, such as keys and values of a prompt, is never taken for another's."""

    def __init__(self) -> None:
        self.count = 0  # that were ever served
        self.known: OrderedDict[str, Any] = OrderedDict()

    def new(self, engine: Any, folder: str) -> Any:
        """A request for it, once vLLM has read its folder: what is wrong with that is an error of
        whoever names it, and does not end the engine."""
        from vllm.lora.request import LoRARequest

        self.count += 1
        found = LoRARequest(f"adapter-{self.count}", self.count, folder)
        engine.add_lora(found)
        return found

    def of(self, engine: Any, folder: str) -> Any:
        """The same for each request that names the folder."""
        if folder not in self.known:
            self.known[folder] = self.new(engine, folder)
            if len(self.known) > KNOWN:
                self.known.popitem(last=False)
        self.known.move_to_end(folder)
        return self.known[folder]

    def forget(self) -> None:
        """vLLM has let go of all of them."""
        self.known.clear()


def rank_for(rank: int) -> int:
    """The least rank that vLLM makes room for which is enough."""
    return next((each for each in RANKS if each >= rank), rank)
