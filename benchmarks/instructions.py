"""The instructions that the kernels of a write and a search are compiled to for sm_90, and those of
each of their loops. Nothing runs: kernels are compiled as tests/kernels/test_compile.py does."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from floors import Shape

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "kernels"))


def loops(code: list[str]) -> list[int]:
    """Instructions of each loop of one compiled kernel, in the order they end; those of loops inside
    count with them. Code behind the end of the program, which jumps back into it, is no loop."""
    labels = {line[:-1]: i for i, line in enumerate(code) if line.endswith(":")}
    found = []
    for i, line in enumerate(code):
        target = re.search(r"BRA.*`\((\.L_x_\d+)\)", line)
        start = labels.get(target.group(1), i) if target else i
        body = [one for one in code[start:i] if not one.endswith(":")]
        if body and not any(re.match(r"EXIT|RET", one) for one in body):
            found.append(len(body) + 1)
    return found


def report(shape: Shape) -> None:
    """Print the table for rows in bfloat16."""
    import pytest
    from compiling import machine_code, recorded
    from test_compile import search, write

    from rsm_torch import RSMConfig

    config = RSMConfig(shape.D, rank=shape.K, storage="bfloat16")
    scores = [("v1", "cosine")]
    with pytest.MonkeyPatch.context() as patch:
        made = recorded(
            patch, "sm_90", lambda: (write(config, shape.T), search(config, scores, shape.Q))
        )
    print(f"\n{'kernel':16}{'warps':>6}{'instructions':>14}  in each loop")
    for kernel, args, options in {one[0].__name__: one for one in made}.values():
        code = machine_code(kernel, args, options)
        whole = sum(not line.endswith(":") for line in code)
        each = ", ".join(map(str, loops(code)))
        print(f"{kernel.__name__:16}{options['num_warps']:6}{whole:14}  {each}")
