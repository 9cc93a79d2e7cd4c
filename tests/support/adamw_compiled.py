# .venv-fla/bin/python -m tests.support.adamw_compiled
"""The kernel of training/fused_adamw.py compiled for GPUs, without one. For each type of moments
and each generation of GPUs it prints how often a program contains an instruction, as JSON."""

import json
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_vlm.config.optimizer_spec import QUANTIZED_BLOCK
from megatron_vlm.training.fused_adamw import adamw_kernel

TYPES = {"weights": "*fp32", "copies": "*i16", "grads": "*fp32", "factor": "*fp32", "skip": "*i32"}
TYPES |= {"count": "i32", "start": "i64", "seed": "i64"}
MOMENTS = {"fp32": "*fp32", "bf16": "*i16", "int8": "*u8"}
OF_CODES = {"scales": "*fp32", "values_of": "*fp32", "codes_of": "*i32"}
INSTRUCTIONS = ("fma.rn.f32", "div.full", "sqrt.approx", "ld.global.v4.b32", "st.global.v4.b32")


def ptx_of(states: str, capability: int) -> str:
    types: dict[str, str] = {}
    constants: dict[str, Any] = {"STATES": states, "BLOCK": QUANTIZED_BLOCK, "BLOCKS": 4}
    for name in adamw_kernel.arg_names:
        ending = next((end for end in OF_CODES if name.endswith(end)), None)
        if ending is not None and states != "int8":
            constants[name] = None
        elif ending is not None:
            types[name] = OF_CODES[ending]
        else:
            types[name] = MOMENTS[states] if name in ("means", "squares") else "fp32"
        types[name] = "constexpr" if name in constants else TYPES.get(name, types.get(name, "fp32"))
    aligned = [each for each in adamw_kernel.arg_names if types[each][0] == "*" or each == "count"]
    numbers = [adamw_kernel.arg_names.index(each) for each in aligned]
    hints = {(number,): [["tt.divisibility", 16]] for number in numbers}
    source = ASTSource(adamw_kernel, types, constants, hints)
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options={"enable_fp_fusion": False})
    assert len(compiled.asm["cubin"]) > 0
    ptx: str = compiled.asm["ptx"]
    return ptx


if __name__ == "__main__":
    cases = [(states, capability) for states in MOMENTS for capability in (80, 90)]
    found = {f"{each[0]}, sm_{each[1]}": ptx_of(*each) for each in cases}
    counts = {name: {it: ptx.count(it) for it in INSTRUCTIONS} for name, ptx in found.items()}
    print(json.dumps(counts))
