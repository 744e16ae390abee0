import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rsm_torch import basis


def decaying(n: int, D: int, seed: int = 0, decay: float = 0.3) -> torch.Tensor:
    """Rows whose singular values fall off geometrically."""
    g = torch.Generator().manual_seed(seed)
    u = torch.linalg.qr(torch.randn(n, min(n, D), generator=g)).Q
    v = torch.linalg.qr(torch.randn(D, min(n, D), generator=g)).Q
    return (u * decay ** torch.arange(min(n, D))) @ v.mT * n**0.5


def angles(u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Principal angles between row spaces, by their sines (cosines lose small angles)."""
    rest = u.double() - u.double() @ v.double().mT @ v.double()
    return torch.linalg.svdvals(rest).clamp(max=1).asin()


@pytest.mark.parametrize(("n", "D"), [(5, 40), (40, 5), (64, 64), (1, 7), (3, 1)])
def test_exact_is_the_svd(n, D):
    x = decaying(n, D)
    K = min(3, D)
    u, s = basis.exact(x, K)
    want = torch.linalg.svd(x.double(), full_matrices=False)
    k = min(K, n)
    torch.testing.assert_close(s[:k].double(), want.S[:k], rtol=1e-3, atol=1e-4)
    assert angles(u[:k], want.Vh[:k].float()).max() < 1e-3
    torch.testing.assert_close(u[:k] @ u[:k].mT, torch.eye(k), atol=1e-4, rtol=0)
    assert not u[k:].any()
    assert not s[k:].any()


@pytest.mark.parametrize("block", [1, 7, 32, 64])
@pytest.mark.parametrize(("K", "decay"), [(2, 0.05), (2, 0.1), (3, 0.1), (2, 0.2)])
def test_updates_end_at_the_svd_of_all_members(block, K, decay):
    x = decaying(200, 48, decay=decay)
    u, s = torch.zeros(1, K, 48), torch.zeros(1, K)
    for rows in x.split(block):
        u, s = basis.update(u, s, rows[None])
    want = torch.linalg.svd(x.double(), full_matrices=False)
    assert angles(u[0], want.Vh[:K].float()).max() < 1e-3
    torch.testing.assert_close(s[0].double(), want.S[:K], rtol=5e-2, atol=0)


def test_padding_rows_change_nothing():
    x = decaying(6, 20)
    empty = torch.zeros(1, 2, 20), torch.zeros(1, 2)
    plain = basis.update(*empty, x[None])
    padded = basis.update(*empty, torch.cat([x, torch.zeros(9, 20)])[None])
    torch.testing.assert_close(plain[1], padded[1])
    assert angles(plain[0][0], padded[0][0]).max() < 1e-4


def test_the_first_direction_lies_on_the_side_of_the_sum():
    u = torch.tensor([[[-1.0, 0, 0], [0, 0.6, -0.8]]])
    assert basis.orient(u, torch.tensor([[2.0, 5, 5]])).tolist() == [[[1, 0, 0], u[0, 1].tolist()]]
    x = decaying(9, 6) - 3
    assert basis.exact(x, 2)[0][0] @ x.sum(0) > 0


def test_groups_hold_every_row_once_in_order():
    g = torch.Generator().manual_seed(0)
    atoms = torch.randint(-1, 4, (3, 200), generator=g)
    x = torch.arange(600.0).view(3, 200, 1) + 1
    slots = torch.tensor([5, 0, 9])
    seen: dict = {}
    for at, rows in basis.groups(slots, x, atoms, room=10):
        assert rows.shape[1] <= basis.ROUND
        for place, r in zip(at.tolist(), rows, strict=True):
            seen.setdefault(divmod(place, 10), []).extend(r[r != 0].tolist())
    for b, slot in enumerate(slots.tolist()):
        for a in range(4):
            assert seen.get((slot, a), []) == x[b, atoms[b] == a].flatten().tolist()


@pytest.mark.parametrize("K", [1, 2, 4, 8])
def test_the_update_that_waits_for_nothing_agrees(K):
    g = torch.Generator().manual_seed(K)
    centres = torch.randn(3, 4, 64, generator=g)
    atoms = torch.randint(4, (3, 40), generator=g)
    x = centres.gather(1, atoms[..., None].expand(3, 40, 64)) + torch.randn(3, 40, 64, generator=g)
    old = centres[:, :, None] + torch.randn(3, 4, 9, 64, generator=g)
    u, s = basis.leading(old.flatten(0, 1), K)
    u, s = u.view(3, 4, K, 64), s.view(3, 4, K)
    one = u.gather(1, atoms[..., None, None].expand(3, 40, K, 64))
    same = atoms[:, :, None] == atoms[:, None]
    new_u, new_s = basis.update_unsynced(
        one, s.gather(1, atoms[..., None].expand(3, 40, K)), x, same
    )
    for b in range(3):
        for a in range(4):
            rows = x[b, atoms[b] == a]
            want_u, want_s = basis.update(u[b, a][None], s[b, a][None], rows[None])
            for t in (atoms[b] == a).nonzero().flatten().tolist():
                torch.testing.assert_close(new_s[b, t], want_s[0], rtol=2e-2, atol=0)
                assert (new_u[b, t, 0] @ want_u[0, 0]).abs() > 1 - 1e-5
                torch.testing.assert_close(
                    new_u[b, t] @ new_u[b, t].mT, torch.eye(K), atol=1e-4, rtol=0
                )


def test_the_update_that_waits_for_nothing_makes_no_copy_of_x_a_chunk():
    class Largest(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                self.most = max(self.most, out.untyped_storage().nbytes() // out.element_size())
            return out

    B, T, K, D = 2, 32, 2, 384
    x = torch.randn(B, T, D)
    same = torch.ones(B, T, T, dtype=torch.bool)
    with Largest() as seen:
        basis.update_unsynced(torch.zeros(B, T, K, D), torch.zeros(B, T, K), x, same)
    assert seen.most <= B * T * max((K + T) ** 2, (K + T) * D // 8, K * D)
