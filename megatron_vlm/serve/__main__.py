"""Entry point of a rank of the service: `torchrun ... -m megatron_vlm.serve key=value ...`."""

import sys

from megatron_vlm.distributed.process import run_process
from megatron_vlm.serve.main import run_serve

if __name__ == "__main__":
    sys.exit(run_process(run_serve, sys.argv[1:]))
