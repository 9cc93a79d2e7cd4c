"""Metrics in the text format of Prometheus."""

import re
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from megatron_vlm.serve.journal.journal_records import CompletedCall

BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
_NAME = re.compile(r"[^a-zA-Z0-9_]")


class Metrics:
    """Counters since the server started."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._accepted: dict[str, int] = defaultdict(int)
        self._done: dict[tuple[str, str], int] = defaultdict(int)
        self._buckets: dict[str, list[int]] = defaultdict(lambda: [0] * len(BUCKETS))
        self._seconds: dict[str, float] = defaultdict(float)

    def count_accepted(self, kind: str) -> None:
        """Count a call that was accepted."""
        with self._lock:
            self._accepted[kind] += 1

    def count_completed(self, promises: Sequence[CompletedCall]) -> None:
        """Count calls that were completed."""
        with self._lock:
            for call in promises:
                self._done[call.kind, "succeeded" if call.succeeded else "failed"] += 1
                self._seconds[call.kind] += call.seconds
                for i, bound in enumerate(BUCKETS):
                    self._buckets[call.kind][i] += call.seconds <= bound

    def text(self, gauges: Mapping[str, float], counters: Mapping[str, float]) -> str:
        """Return all metrics as text, with gauges and counters that other objects hold."""
        with self._lock:
            lines = [*self._calls()]
        for kind, figures in (("gauge", gauges), ("counter", counters)):
            for name, value in figures.items():
                full = f"megatron_vlm_{_NAME.sub('_', name)}"
                lines += [f"# TYPE {full} {kind}", f"{full} {_number(value)}"]
        return "\n".join(lines) + "\n"

    def _calls(self) -> Iterable[str]:
        name = "megatron_vlm_calls_accepted_total"
        yield f"# HELP {name} Calls that were promised.\n# TYPE {name} counter"
        for kind, count in sorted(self._accepted.items()):
            yield f'{name}{{kind="{kind}"}} {count}'
        name = "megatron_vlm_calls_done_total"
        yield f"# HELP {name} Calls that have a result.\n# TYPE {name} counter"
        for (kind, how), count in sorted(self._done.items()):
            yield f'{name}{{kind="{kind}",outcome="{how}"}} {count}'
        name = "megatron_vlm_call_seconds"
        yield f"# HELP {name} From the acceptance of a call to its result.\n# TYPE {name} histogram"
        for kind, counts in sorted(self._buckets.items()):
            total = sum(n for (other, _), n in self._done.items() if other == kind)
            for bound, count in zip(BUCKETS, counts, strict=True):
                yield f'{name}_bucket{{kind="{kind}",le="{bound:g}"}} {count}'
            yield f'{name}_bucket{{kind="{kind}",le="+Inf"}} {total}'
            yield f'{name}_sum{{kind="{kind}"}} {_number(self._seconds[kind])}'
            yield f'{name}_count{{kind="{kind}"}} {total}'


def _number(value: float) -> str:
    special = {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}
    text = repr(float(value))
    return special.get(text, text)
