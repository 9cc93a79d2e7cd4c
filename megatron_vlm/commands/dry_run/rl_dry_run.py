"""`megatron-vlm rl --dry-run`: the plan of a run, its engine, and the rewards of a few answers."""

from rich.console import Console

from megatron_vlm.commands.dry_run.command import (
    open_training_data,
    plan_model,
    print_memory,
    print_run,
)
from megatron_vlm.commands.dry_run.reward_trial import reward_table, try_reward
from megatron_vlm.commands.dry_run.teacher_plan import describe_teachers
from megatron_vlm.config.command_checks import has_rewards
from megatron_vlm.config.schema import Config
from megatron_vlm.data.batches.dataset import DataSet
from megatron_vlm.engines.find_vllm import find_vllm
from megatron_vlm.hf.push import check_push
from megatron_vlm.report.run_overview import aligned_lines


def rl_dry_run(cfg: Config, gpus: int | None = None, memory: str | None = None) -> int:
    """Print the plan of `rl`; raise the errors that would end the run."""
    console = Console(highlight=False)
    if cfg.checkpoint.push is not None:
        check_push(cfg.checkpoint.push)
    sampler = _sampler(cfg)
    model = plan_model(cfg, console, gpus, memory)
    data = open_training_data(model, prompts_only=True)
    assert isinstance(data, DataSet), "config/command_checks.py refuses streams"
    needs = print_run(model, data, console, prompts_only=True)
    rl, train = cfg.rl, cfg.train
    rows = {
        "samples": f"{rl.samples} answers of at most {rl.max_new_tokens:,} tokens to each of "
        f"{train.global_batch_size:,} prompts a step, in {rl.updates} "
        f"update{'s' * (rl.updates > 1)}",
        "sampler": sampler,
        **describe_teachers(model),
    }
    if has_rewards(cfg):
        count = f"{rl.processes} process{'es' * (rl.processes > 1)}"
        rows["reward"] = f"{rl.reward or rl.environment}, in {count}"
    console.print(aligned_lines(rows), markup=False, soft_wrap=True)
    if has_rewards(cfg):
        console.print(reward_table(list(try_reward(cfg, data))))
    print_memory(model, needs, console)
    notes = ["Answers are counted with rl.max_new_tokens each; what sampling needs comes on top."]
    if rl.kl_coef is not None:
        notes.append("The initial model, for rl.kl_coef, needs the weights of each stage again.")
    console.print(" ".join(notes), soft_wrap=True)
    return 0


def _sampler(cfg: Config) -> str:
    if cfg.rl.sampler == "own":
        return f"the trainer's own decoder, {cfg.rl.sampler_rows} rows a pass in each replica"
    version = find_vllm(str(cfg.rl.engine), "rl.engine")
    return f"vLLM {version} of {cfg.rl.engine}{engine_places(cfg.rl.engine_gpus)}"


def engine_places(gpus: tuple[str, ...]) -> str:
    """Describe the GPUs of the engines."""
    return f", on GPUs {' and '.join(gpus)}" if gpus else ""
