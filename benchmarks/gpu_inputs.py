"""What gpu.py checks and times: memories, chunks, and calls on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def random_memory(
    device, shape: tuple[int, int, int, int, int], dtype, backend: str = "auto", writes: int = 4
):
    """A memory of B streams that wrote N clustered chunks each, with room for M atoms, or for
    `writes` more calls of T chunks that may all open atoms."""
    import torch

    from rsm_torch import RSMConfig, StreamMemory

    B, T, N, M, D = shape
    storage = str(dtype).removeprefix("torch.")
    memory = StreamMemory(RSMConfig(dim=D, tau=0.75, storage=storage), B, device, backend=backend)
    memory.reserve(N + writes * T, M or None)
    generator = torch.Generator(device).manual_seed(0)
    step = max(32, N // 64)
    for n0 in range(0, N, step):
        memory.write(clustered(B, min(step, N - n0), D, generator, device))
    if M == 0:
        memory.reserve(writes * T)
    return memory


def clustered(B: int, T: int, D: int, generator, device):
    """Unit chunks [B, T, D] around sixteen directions that all streams share."""
    import torch

    centres = torch.randn(16, D, generator=torch.Generator().manual_seed(1)).to(device)
    pick = torch.randint(16, (B, T), generator=generator, device=device)
    noise = torch.randn(B, T, D, generator=generator, device=device)
    return torch.nn.functional.normalize(centres[pick] + 0.5 * noise, dim=-1)


def gate_call(memory, x, backend: str = "triton", gate: str = "max_member") -> Callable:
    import torch

    from rsm_kernels.merge_gate import merge_gate

    bank, (B, T, _) = memory.bank, x.shape
    valid, slots = (
        torch.ones(B, T, dtype=torch.bool, device=x.device),
        torch.arange(B, device=x.device),
    )
    state = (bank.sums, bank.n_atoms, bank.members, bank.member_atom, bank.n_members)
    return lambda: merge_gate(x, valid, slots, *state, tau=0.75, gate=gate, backend=backend)


def search_call(memory, q, backend: str = "triton") -> Callable:
    import torch

    from rsm_kernels.atom_search import atom_search

    bank, slots = memory.bank, torch.arange(len(q), device=q.device)
    state = (bank.sums, bank.basis, bank.n_atoms, bank.members, bank.member_atom, bank.n_members)
    return lambda: atom_search(q, slots, *state, top_atoms=5, top_k=20, backend=backend)


def pairs_call(memory, x, backend: str = "triton") -> Callable:
    """Leading eigenpairs as a write of x [B, T, D] asks for them: a Gram matrix for each chunk."""
    import torch

    from rsm_kernels.subspace_iteration import subspace_iteration

    rank = memory.config.rank
    rows = torch.nn.functional.pad(x, (0, 0, rank, 0), value=0.1)  # an old basis beside them
    gram = (rows @ rows.mT).repeat_interleave(x.shape[1], 0)
    return lambda: subspace_iteration(gram, rank, backend)


def memory_calls(memory, x) -> dict[str, Callable]:
    """A whole write of chunks x [B, T, D] and a whole search for the first of each stream, as a
    server makes them: arguments on the device and trusted."""
    import torch

    slots = torch.arange(len(x), device=x.device)
    return {
        "write": lambda: memory.write(x, streams=slots, check=False),
        "search": lambda: memory.search(x[:, 0], streams=slots, check=False),
    }


def snapshot(memory) -> dict[str, Any]:
    """A copy of the memory's tensors, for `restore`."""
    return {name: tensor.clone() for name, tensor in memory.bank.named_buffers()}


def restore(memory, saved: dict[str, Any]) -> None:
    """Put the tensors back where they are, so that a captured graph still finds them."""
    for name, tensor in memory.bank.named_buffers():
        tensor.copy_(saved[name])
