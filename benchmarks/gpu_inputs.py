"""What gpu.py checks and times: memories, chunks, and calls on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def random_memory(device, shape: tuple[int, int, int, int], dtype, writes: int = 4):
    """A memory of B streams that wrote N clustered chunks each, with room for `writes` more calls of
    T chunks that may all open atoms. Shape: B, T, N, D."""
    import torch

    from rsm_torch import RSMConfig, StreamMemory

    B, T, N, D = shape
    storage = str(dtype).removeprefix("torch.")
    memory = StreamMemory(RSMConfig(dim=D, tau=0.75, storage=storage), B, device, backend="triton")
    generator = torch.Generator(device).manual_seed(0)
    step = max(32, N // 64)
    memory.reserve(N + writes * T, writes * T)
    for n0 in range(0, N, step):
        memory.write(clustered(B, min(step, N - n0), D, generator, device))
    memory.state.read()
    memory.reserve(writes * T, writes * T)
    return memory


def clustered(B: int, T: int, D: int, generator, device):
    """Unit chunks [B, T, D] around sixteen directions that all streams share."""
    import torch

    centres = torch.randn(16, D, generator=torch.Generator().manual_seed(1)).to(device)
    pick = torch.randint(16, (B, T), generator=generator, device=device)
    noise = torch.randn(B, T, D, generator=generator, device=device)
    return torch.nn.functional.normalize(centres[pick] + 0.5 * noise, dim=-1)


def memory_calls(memory, x) -> dict[str, Callable]:
    """Whole calls with chunks x [B, T, D], as a server makes them, trusted: a plan, which changes
    nothing, a write, and a search for the first chunk of each stream."""
    return {
        "plan": lambda: memory.plan(x, check=False),
        "write": lambda: memory.write(x, check=False),
        "search": lambda: memory.search(x[:, 0], check=False),
    }


def tensors(memory) -> list[Any]:
    """Every tensor that a write changes."""
    state = memory.state
    columns = [c for extents in (state.rows, state.atoms) for c in extents.columns.values()]
    for pool in state.pools:
        columns += [*pool.columns.values(), pool.refs, pool.free]
    return [state.books, state.counts, state.times, *(column.tensor for column in columns)]


def snapshot(memory) -> list[Any]:
    """A copy of the memory's tensors, for `restore`."""
    return [tensor.clone() for tensor in tensors(memory)]


def restore(memory, saved: list[Any]) -> None:
    """Put the tensors back where they are, so that a captured graph still finds them, and let the
    host read what is true."""
    for tensor, old in zip(tensors(memory), saved, strict=True):
        tensor.copy_(old)
    memory.state.read()
