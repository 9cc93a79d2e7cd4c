"""Start of a service on rank 0: the journal, the reader of requests, and the HTTP server."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from megatron_vlm.config.command_checks import loaded_counts
from megatron_vlm.config.schema import Config
from megatron_vlm.data.tokens.completions import COLDEST
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.engines.engine_kinds import EngineSettings, engine_kind
from megatron_vlm.engines.engine_thread import EngineThread
from megatron_vlm.errors import ConfigError
from megatron_vlm.hf.hf_checkpoint import HFCheckpoint
from megatron_vlm.serve.adapter_checks import AdapterChecks
from megatron_vlm.serve.chat_texts import TokenizerTexts
from megatron_vlm.serve.engine_samples import EngineSampling
from megatron_vlm.serve.http.api_keys import ApiKeys
from megatron_vlm.serve.http.app import make_app
from megatron_vlm.serve.http.context import ServerFacts
from megatron_vlm.serve.http.http_server import FrontServer
from megatron_vlm.serve.http.request_bodies import RequestLimits
from megatron_vlm.serve.journal.calls import Bounds
from megatron_vlm.serve.journal.cleanup import JournalExpiry
from megatron_vlm.serve.journal.journal import Journal
from megatron_vlm.serve.request_prefetch import RequestPrefetcher
from megatron_vlm.serve.requests_as_rows import RowReader
from megatron_vlm.serve.sample_calls import SampleBounds
from megatron_vlm.serve.served_models import ModelCommands
from megatron_vlm.serve.service import Service
from megatron_vlm.version import __version__

ENGINE_MAX_LEN = 32768  # tokens of a prompt and its answer, where engine.max_len is not set


def open_service(
    cfg: Config, commands: ModelCommands, opened: ExitStack
) -> tuple[Service, FrontServer, str]:
    """Open all parts of the service, and return its address, too. `opened` closes the journal and
    the engines."""
    limits = limits_of(cfg.serve.limits)
    keys = None if cfg.serve.keys is None else ApiKeys(Path(cfg.serve.keys))
    base = commands.models.base
    bounds = Bounds(limits.open_calls, limits.open_bytes, limits.models)
    journal = Journal(Path(cfg.run), bounds, JournalExpiry(superseded=limits.snapshot_seconds))
    opened.callback(journal.close)
    reader = RowReader(cfg, str(base.source.path), base.source.sizes, limits.pixels)
    texts = TokenizerTexts(cfg, base.source.sizes, limits.pixels)
    # Before HTTP: engines load for minutes.
    samples, engines = _start_engine(cfg, commands, limits, reader.longest, opened)
    prefetcher = RequestPrefetcher(
        journal, reader, texts.stops, samples, base.dims.dp, limits.waiting_pixels
    )
    engine_sampling = None
    if engines is not None:
        engine_sampling = EngineSampling(engines, journal, prefetcher, str(base.source.path))
        engine_sampling.start()
    service = Service(cfg, commands, journal, prefetcher, engine_sampling)
    service.model_cache.delete_orphan_folders()
    facts = facts_of(cfg, base.source, base.dims)
    adapters = AdapterChecks(cfg, base.source.sizes)
    app = make_app(journal, limits, keys, facts, service.gauges, texts, samples.longest, adapters)
    service.drawing.hear = app.state.chats.source.pieces.add
    server = FrontServer(app, cfg.serve.host, cfg.serve.port)
    port = server.start()
    host = f"[{cfg.serve.host}]" if ":" in cfg.serve.host else cfg.serve.host
    return service, server, cfg.serve.url or f"http://{host}:{port}"


def limits_of(limits: Mapping[str, Any]) -> RequestLimits:
    """Return the default limits with the changes of serve.limits."""
    if not isinstance(limits, Mapping):
        raise ConfigError(key="serve.limits", found=limits, allowed="{NAME: NUMBER}")
    defaults = RequestLimits()
    types = {each.name: type(getattr(defaults, each.name)) for each in fields(defaults)}
    for name, value in limits.items():
        if name not in types:
            raise ConfigError("is not a limit", key=f"serve.limits.{name}", allowed=tuple(types))
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ConfigError(key=f"serve.limits.{name}", found=value, allowed="a number above 0")
    return replace(defaults, **{name: types[name](value) for name, value in limits.items()})


def _start_engine(
    cfg: Config, commands: ModelCommands, limits: RequestLimits, longest: int, opened: ExitStack
) -> tuple[SampleBounds, EngineThread | None]:
    """Start the engine, unless it is the ranks. Return the bounds of its samples, too."""
    kind, base = engine_kind(cfg.engine.name), commands.models.base
    if kind.on_ranks:
        return SampleBounds(limits.max_tokens, longest, min_temperature=COLDEST), None
    longest, least = min(longest, cfg.engine.max_len or ENGINE_MAX_LEN), kind.min_temperature
    settings = EngineSettings.from_config(
        cfg.engine,
        str(base.source.path),
        dtype=str(base.chunks[0].config.params_dtype).removeprefix("torch."),
        max_len=longest,
        pictures=cfg.engine.pictures or limits.pictures,
        videos=cfg.engine.videos,
        lora_rank=cfg.serve.max_rank,
        adapters=loaded_counts(cfg.serve)["snapshots"],
    )
    engines = EngineThread()
    opened.callback(engines.close)
    engines.start(cfg.engine, settings, commands.wait)
    return SampleBounds(limits.max_tokens, longest, "the engine (engine.max_len)", least), engines


def facts_of(cfg: Config, source: HFCheckpoint, dims: ParallelDims) -> ServerFacts:
    """Return the description of the server and its model for clients."""
    names = dict.fromkeys([cfg.serve.name or cfg.model.path, cfg.model.path])
    return ServerFacts(
        tuple(names),
        source.sizes.text.max_positions,
        cfg.model.path,
        source.family.model_type,
        __version__,
        cfg.serve.url,
        f"tp={dims.tp} pp={dims.pp} dp={dims.dp}",
        source.sizes.text.vocab,
        engine_kind(cfg.engine.name).has_grammars,
        engine_kind(cfg.engine.name).has_penalties,
    )
