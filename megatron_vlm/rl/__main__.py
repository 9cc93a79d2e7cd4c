"""Entry point of a rank of a run: `torchrun ... -m megatron_vlm.rl key=value ...`."""

import sys

from megatron_vlm.distributed.process import run_process
from megatron_vlm.rl.rl_train import run_rl

if __name__ == "__main__":
    sys.exit(run_process(run_rl, sys.argv[1:]))
