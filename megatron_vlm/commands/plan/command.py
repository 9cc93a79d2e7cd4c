"""`megatron-vlm plan`: search, print and write the page; if nothing fits, suggest changes."""

import argparse
import math
import re
from dataclasses import replace

from megatron_vlm.commands.plan.plan_arguments import parse_memory
from megatron_vlm.commands.plan.plan_report import Plan, fit_report, plan_report
from megatron_vlm.config.schema import Config
from megatron_vlm.config.trainable import SWITCHES, extra_head, learns
from megatron_vlm.distributed.device import CARDS, WITHOUT_BF16, card_of
from megatron_vlm.errors import ConfigError
from megatron_vlm.family import read_sizes
from megatron_vlm.planner.advice import fitting_sets, rank_layouts, switch_costs
from megatron_vlm.planner.hardware import gpu
from megatron_vlm.planner.row_sizes import mix_of
from megatron_vlm.planner.search import Cluster
from megatron_vlm.report.terminal import show_report
from megatron_vlm.run.run_folder import with_model

SHOWN = 8


def run_plan(cfg: Config, cluster: Cluster, fit: bool, html: str | None) -> None:
    """Print the best layouts of a cluster, or with `fit` the switches with which it fits."""
    if not cfg.lora.rank and not any(learns(cfg, part) for part in SWITCHES):
        raise ConfigError(
            ": everything is frozen, and nothing is left to plan for",
            key="model.freeze_language",
            found=True,
        )
    if cluster.machine.card in WITHOUT_BF16 and cfg.train.precision != "fp32":
        raise ConfigError(
            "has no bf16, in which a GPU trains",
            key="--gpu",
            found=cluster.machine.name,
            remedy="plan with train.precision=fp32, which is slow and needs twice the memory for "
            "weights, or for a card of 2020 or later, such as A10 or RTX 3090; fp16 is not trained",
        )
    cfg = with_model(cfg, weights=False)
    sizes = read_sizes(cfg.model.path, cfg.data.add_tokens, extra_head(cfg))
    mix = mix_of(cfg, sizes)
    has_experts = sizes.text.experts is not None
    if fit:
        sets = fitting_sets(cfg, sizes, mix, cluster)
        plan = Plan(cfg, mix, cluster, (sets[0].best,), len(sets), has_experts)
        costs = switch_costs(sets[0], sizes, mix, cluster)
        show_report(fit_report(plan, sets, costs), html)
        return
    ranked = rank_layouts(cfg, sizes, mix, cluster)
    shown = ranked[:SHOWN]
    if not any(each.dims.pp > 1 for each in shown):  # add one layout with a pipeline, to compare
        shown += [each for each in ranked[SHOWN:] if each.dims.pp > 1][:1]
    plan = Plan(cfg, mix, cluster, tuple(shown), len(ranked), has_experts)
    show_report(plan_report(plan), html)


def plan_cluster(args: argparse.Namespace) -> Cluster:
    """Return the GPUs of the command line."""
    name, efficiency, host_link = args.gpu, args.efficiency, args.host_link
    if not 1 <= args.gpus <= 4096:
        raise ConfigError(key="--gpus", found=args.gpus, allowed=range(1, 4097))
    if not 0 < efficiency <= 1:
        raise ConfigError(
            key="--efficiency", found=efficiency, allowed="a fraction of the peak, above 0 to 1"
        )
    if (card := card_of(name)) is None:
        raise ConfigError(
            ": its peak is not known",
            key="--gpu",
            found=name,
            allowed=tuple(CARDS),
            remedy=f"choose from {', '.join(CARDS)}, and scale it with --efficiency",
        )
    named = re.search(r"\d+ ?GB\b", name)  # as in A100-SXM4-40GB
    size = f"{named[0].rstrip('GB') if named else CARDS[card].memory}GiB"
    machine = gpu(name, CARDS[card].peak, efficiency)
    if host_link is not None:
        if not 0 < host_link <= 10_000:
            raise ConfigError(key="--host-link", found=host_link, allowed="GB/s, above 0 to 10,000")
        machine = replace(machine, host_link=host_link * 1e9)
    host = math.inf if args.host_memory is None else parse_memory(args.host_memory, "--host-memory")
    return Cluster(args.gpus, parse_memory(args.memory or size), machine, host)
