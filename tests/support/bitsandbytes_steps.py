"""Steps of bitsandbytes' AdamW with moments in 8 bits, in an environment of its own:

    python bitsandbytes_steps.py IN OUT

IN is a file of torch with `weight`, `grads` and `settings`; OUT gets the weight after the steps,
and the dynamic maps with and without signs.
"""

import sys

import bitsandbytes
import torch
from bitsandbytes.functional import create_dynamic_map


def main(given: str, out: str) -> None:
    case = torch.load(given)
    weight = torch.nn.Parameter(case["weight"])
    optimizer = bitsandbytes.optim.AdamW8bit([weight], min_8bit_size=1, **case["settings"])
    for grad in case["grads"]:
        weight.grad = grad
        optimizer.step()
    maps = {signed: create_dynamic_map(signed) for signed in (True, False)}
    torch.save({"weight": weight.detach(), "maps": maps}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
