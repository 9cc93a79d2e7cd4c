"""HTML page of a service: its runs, their checkpoints and the waiting calls."""

import time
from collections import Counter
from collections.abc import Iterator

from megatron_vlm.io.printable import number, size_text, time_spent
from megatron_vlm.report.html import render_page
from megatron_vlm.report.sections import Heading, Report, Section, Table, Tiles
from megatron_vlm.serve.http.context import ServerFacts
from megatron_vlm.serve.journal.journal import Journal
from megatron_vlm.serve.journal.journal_records import Call, Model, NamedCheckpoint

_MAX_ROWS = 200  # maximum rows of a table
_FIGURES = 4


def service_page(journal: Journal, facts: ServerFacts, key: str) -> str:
    """Render the page of the objects that belong to this key."""
    models, checkpoints = journal.models(key), journal.checkpoints(key)
    waiting = [call for call in journal.open_calls() if call.key == key]
    ready = sum(model.state == "ready" for model in models)
    tiles = [
        (f"{ready:,}", "models ready"),
        (f"{len(checkpoints):,}", "checkpoints"),
        (size_text(sum(c.size for c in checkpoints)), "on the disk"),
        (f"{len(journal.samplers(key)):,}", "sampling sessions"),
        (f"{len(waiting):,}", "calls waiting"),
    ]
    lead = f"{facts.layout} \u00b7 version {facts.version} \u00b7 key {key}"
    sections = [*_runs(models), *_checkpoints(checkpoints), *_waiting_section(waiting)]
    name = facts.base_models[0]
    return render_page(Report(f"{name} - service", name, [lead], [Tiles(tiles)], sections))


def _runs(models: list[Model]) -> Iterator[Section]:
    yield Heading("Runs", "Runs")
    rows = [
        (
            f"{model.id} ({name})" if (name := model.user_metadata.get("name")) else model.id,
            model.state,
            "full" if model.lora_rank == 0 else f"LoRA {model.lora_rank}",
            f"{model.next_seq - 1:,}",
            ", ".join(f"{k} {number(v)}" for k, v in [*model.figures.items()][:_FIGURES]) or "-",
            _age_text(model.used),
        )
        for model in models[:_MAX_ROWS]
    ]
    header = ("run", "state", "weights", "calls done", "last figures", "used")
    yield Table(header, rows, _count_remark(len(models), "There is none yet."))


def _checkpoints(checkpoints: list[NamedCheckpoint]) -> Iterator[Section]:
    yield Heading("Checkpoints", "Checkpoints")
    rows = [
        (c.path, c.kind, size_text(c.size), _age_text(c.created), _expiry(c.expires))
        for c in checkpoints[:_MAX_ROWS]
    ]
    header = ("path", "kind", "size", "made", "expires")
    yield Table(header, rows, _count_remark(len(checkpoints), "There is none yet."))


def _waiting_section(waiting: list[Call]) -> Iterator[Section]:
    yield Heading("Waiting", "Waiting")
    rows = []
    for kind, count in Counter(call.kind for call in waiting).most_common():
        calls = [call for call in waiting if call.kind == kind]
        size = size_text(sum(call.size for call in calls))
        rows.append((kind, f"{count:,}", size, _age_text(calls[0].accepted)))
    header = ("call", "count", "size", "oldest")
    yield Table(header, rows, _count_remark(len(rows), "No call waits."))


def _count_remark(count: int, none: str) -> str:
    if count == 0:
        return none
    return f"The newest {_MAX_ROWS:,} of {count:,}." if count > _MAX_ROWS else ""


def _age_text(when: float) -> str:
    return f"{time_spent(max(time.time() - when, 0.0))} ago"


def _expiry(when: float | None) -> str:
    return "never" if when is None else f"in {time_spent(max(when - time.time(), 0.0))}"
