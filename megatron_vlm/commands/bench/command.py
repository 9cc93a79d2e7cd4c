"""`megatron-vlm bench RUN`: public benchmarks of a model before and after its training."""

import argparse

_SUITES = ("lmms-eval",)


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    where = "a run: its base model is before, its export after"
    parser.add_argument("run_folder", metavar="RUN", help=where)
    parser.add_argument("--suite", choices=_SUITES, default=_SUITES[0], help="default: lmms-eval")
    tasks = "tasks of the suite, such as mmmu_val,docvqa_val (required)"
    parser.add_argument("--tasks", metavar="LIST", help=tasks)
    python = "of the environment that has vLLM, such as .venv-vllm/bin/python (required)"
    parser.add_argument("--engine", metavar="PYTHON", help=python)
    python = "of the environment that has the suite, such as .venv-lmms/bin/python (required)"
    parser.add_argument("--suite-python", metavar="PYTHON", help=python)
    limit = "samples of each task (default: all)"
    parser.add_argument("--limit", type=int, metavar="N", help=limit)
    include = "a folder with tasks of your own, as the suite describes them"
    parser.add_argument("--include", metavar="DIR", help=include)
    devices = "CUDA_VISIBLE_DEVICES of the engine (default: as here)"
    parser.add_argument("--devices", metavar="LIST", help=devices)
    concurrent = "requests in progress (default: 32)"
    parser.add_argument("--concurrent", type=int, default=32, metavar="N", help=concurrent)
    more = "more arguments of vLLM's server, such as '--tensor-parallel-size 2'"
    parser.add_argument("--engine-args", default="", metavar="TEXT", help=more)
    more = "more arguments of the suite's runner"
    parser.add_argument("--suite-args", default="", metavar="TEXT", help=more)


def bench(args: argparse.Namespace) -> None:
    """score a model before and after its training by public benchmarks

    Serve the base model of a run and its export by vLLM, one after the other, and let a suite such
    as lmms-eval ask them. The table of both goes into RUN/bench/scores.json, the page of the run
    and the model card of its export. Tasks that are complete are not run again, so an interrupted
    command goes on where it was.

    example: megatron-vlm bench runs/first --tasks mmmu_val,docvqa_val --engine
    .venv-vllm/bin/python --suite-python .venv-lmms/bin/python

    docs/evaluation.md describes the environment of the suite, and tasks of your own.
    """
    from megatron_vlm.commands.bench.run_benchmarks import run_benchmarks

    run_benchmarks(args)
