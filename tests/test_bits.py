"""Few-bit codes of rotated rows: unbiased scores with a bound, and the rotation beneath them."""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize

from benchmarks.side_by_side.search_faiss import rabitq
from rsm_torch.config import RSMConfig
from rsm_torch.memory import StreamMemory
from rsm_torch.storage import BITS, codec
from rsm_torch.storage.bits import nearest, numbers_of, packed
from rsm_torch.storage.rotation import DENSE, Rotation

every_storage = pytest.mark.parametrize("name", BITS)
# Of which some are one matrix, and some turns; and blocks that are all, nearly all, or half of it.
WIDTHS = (1, 2, 3, 33, 384, 1000, DENSE, DENSE + 1, 1500)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def unit(*shape: int, seed: int = 0) -> torch.Tensor:
    return normalize(draw(*shape, seed=seed), dim=-1)


def pairs(kind: str, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """1,000 queries and 1,000 rows, 10⁶ pairs: in all directions; in a narrow cone; of three
    numbers each; or rows that are each near some of the queries."""
    q, rows = unit(1000, width, seed=1), unit(1000, width, seed=2)
    if kind == "cone":
        return normalize(q + 2 * q[0], dim=-1), normalize(rows + 2 * q[0], dim=-1)
    if kind == "sparse":
        mask = torch.rand(1000, width, generator=torch.Generator().manual_seed(3))
        return q, normalize(rows * (mask >= mask.topk(3).values[:, -1:]), dim=-1)
    if kind == "near":
        return q, normalize(rows + q.roll(1, 0) + q.roll(2, 0), dim=-1)
    return q, rows


@every_storage
@pytest.mark.parametrize("width", [33, 384, 576])
@pytest.mark.parametrize("kind", ["plain", "cone", "sparse", "near"])
def test_errors_are_within_the_bound(name, width, kind):
    """Over 10⁶ pairs. As many errors as the rate allows, and not so few that the bound says
    nothing: the spread of errors is what it is made from."""
    q, rows = pairs(kind, width)
    c = codec(name, width)
    parts = c.encode(rows)
    truth = q.double() @ rows.double().mT
    error = c.scores(q, parts).double() - truth
    for rate in (1e-1, 1e-2, 1e-3):
        bound = c.bound(parts, rate)
        assert (error.abs() > bound).double().mean() <= rate
        assert bound.mean() < 10 * error.square().mean().sqrt()


@every_storage
@pytest.mark.parametrize("cosine", [-0.5, 0.0, 0.3, 0.9, 1.0])
def test_scores_have_no_bias(name, cosine):
    """Over rotations: the same pair in 2,000 positions."""
    width = 48
    turns = torch.linalg.qr(draw(2000, width, width, seed=4)).Q
    x, y = turns[:, 0], cosine * turns[:, 0] + (1 - cosine**2) ** 0.5 * turns[:, 1]
    c = codec(name, width)
    error = (c.decode(c.encode(x)) * y).sum(-1).double() - cosine
    assert error.mean().abs() < 4 * error.std() / 2000**0.5 + 1e-6


@every_storage
def test_a_row_has_its_score_with_itself(name):
    x = unit(50, 384)
    c = codec(name, 384)
    parts = c.encode(x)
    torch.testing.assert_close((c.decode(parts) * x).sum(-1), torch.ones(50), atol=1e-5, rtol=0)
    norms = c.decode(parts).square().sum(-1)
    torch.testing.assert_close(c.decode_norms(parts), norms, atol=1e-4, rtol=0)
    usual = {"bits1": 1.57, "bits2": 1.134, "bits3": 1.038, "bits4": 1.011}[name]
    assert abs(float(norms.mean() - 1) / (usual - 1) - 1) < 0.1


def test_more_bits_come_nearer():
    rows = unit(200, 384)
    bounds = [float(codec(name, 384).bound(codec(name, 384).encode(rows)).mean()) for name in BITS]
    for fewer, more in pairwise(bounds):
        assert more < 0.6 * fewer


@pytest.mark.parametrize("rate", [0.0, 1.0, -1, float("nan")])
def test_a_bound_needs_a_rate(rate):
    c = codec("bits1", 8)
    with pytest.raises(ValueError, match=r"rate: expected a share in \(0, 1\)"):
        c.bound(c.encode(unit(2, 8)), rate)


@every_storage
def test_other_widths_are_refused(name):
    c = codec(name, 8)
    for call in (lambda: c.encode(unit(2, 7)), lambda: c.layout(7), lambda: c.nbytes(1, 7)):
        with pytest.raises(ValueError, match="expected width 8, got 7"):
            call()


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("width", [64, 384])
def test_codes_are_nearly_the_nearest_there_are(bits, width):
    """Against every rounding there is, by the sweep over the scales at which a number changes."""
    z = unit(100, width, seed=bits).abs().double().numpy()
    half = 1 << bits - 1
    best = np.zeros(len(z))
    for at, row in enumerate(z):
        step, place = np.divmod(np.arange((half - 1) * width), width)
        order = np.argsort((step + 1) / row[place], kind="stable")
        dot = row.sum() / 2 + np.concatenate([[0], row[place[order]].cumsum()])
        square = width / 4 + np.concatenate([[0], 2.0 * (step[order] + 1).cumsum()])
        best[at] = (dot / np.sqrt(square)).max()
    held = nearest(z.astype(np.float32), bits) + 0.5
    cosine = (held * z).sum(1) / np.sqrt((held * held).sum(1))
    assert (cosine <= best + 1e-6).all()
    widening = np.sqrt((1 / cosine**2 - 1) / (1 / best**2 - 1))  # of the error
    assert widening.mean() < 1.02


@pytest.mark.parametrize("bits", [1, 2, 4])
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), width=st.integers(1, 40))
def test_packing_loses_nothing(bits, seed, width):
    u = np.random.default_rng(seed).integers(0, 1 << bits, (3, width)).astype(np.uint8)
    codes = packed(u, bits)
    assert codes.shape == (3, -(-width * bits // 8))
    numbers = numbers_of(bits)[codes].reshape(3, -1)[:, :width]
    assert ((numbers + (1 << bits) - 1) / 2 == u).all()


@every_storage
def test_a_code_does_not_depend_on_what_stands_beside_it(name):
    x = unit(61, 384)
    c = codec(name, 384)
    every = c.encode(x)
    decoded = c.decode(every)
    for first, n in ((0, 1), (3, 2), (5, 30), (60, 1)):
        parts = c.encode(x[first : first + n])
        for key, part in parts.items():
            assert torch.equal(part, every[key][first : first + n])
        assert torch.equal(c.decode(parts), decoded[first : first + n])


# -- the rotation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("width", WIDTHS)
def test_a_rotation_keeps_products_and_is_undone(width):
    r, x = Rotation(width), draw(7, width).numpy()
    y = r.apply(x)
    np.testing.assert_allclose(y @ y.T, x @ x.T, atol=2e-5 * width**0.5 + 1e-4, rtol=1e-4)
    np.testing.assert_allclose(r.undo(y), x, atol=1e-4)
    assert (r.matrix is None) == (width > DENSE)


@pytest.mark.parametrize("width", [384, 576, 1000, 1500])
def test_no_number_stands_out_of_a_rotated_row(width):
    """Of one number, two, and steps: what a rotation at random makes of them looks normal, and the
    cosine of its signs is √(2/π) as theirs is."""
    one = np.eye(width, dtype=np.float32)[:: width // 128]
    two = (one + np.roll(one, 1, 1)) / np.float32(np.sqrt(2))
    steps = np.tril(np.ones((width, width), np.float32))[:: width // 128]
    steps /= np.linalg.norm(steps, axis=1, keepdims=True)
    for rows in (one, two, steps):
        y = Rotation(width).apply(rows)
        cosine = np.abs(y).sum(1) / np.sqrt(width)
        assert abs(cosine.mean() - np.sqrt(2 / np.pi)) < 0.02
        assert cosine.min() > 0.74
        assert np.abs(y).max() < 6.5 / np.sqrt(width)


def test_the_rotation_is_the_same_for_good():
    """Files hold codes of it: what it draws may never change."""
    digest = hashlib.sha256()
    for width in (5, 384, 1500):
        for order, signs in Rotation(width).turns:
            digest.update(order.astype("<i8").tobytes() + signs.astype("<f4").tobytes())
    assert digest.hexdigest() == "a5e1e471dca3ef61a0a7c841b54e9d4ea1f51d95c54aaab9cd9b14eeab270b77"


# -- beside others ---------------------------------------------------------------------------------


@pytest.mark.skipif(find_spec("faiss") is None, reason="no faiss: pip install faiss-cpu")
@every_storage
def test_recall_is_that_of_faiss_at_fewer_bytes(name):
    """Its RaBitQ behind its own random rotation, without a centre."""
    import faiss

    if not hasattr(faiss, "IndexRaBitQ"):
        pytest.skip("this faiss has no IndexRaBitQ")
    width = 128
    centres = unit(20, width, seed=5)
    rows = normalize(centres.repeat(50, 1) + 0.12 * draw(1000, width, seed=6), dim=-1)
    q = normalize(centres.repeat(10, 1) + 0.12 * draw(200, width, seed=7), dim=-1)
    index = rabitq(width, BITS[name])
    index.add(rows.numpy())
    c = codec(name, width)
    parts = c.encode(rows)
    want = (q @ rows.mT).topk(10).indices
    ours = c.scores(q, parts).topk(10).indices
    theirs = torch.from_numpy(index.search(q.numpy(), 10)[1])
    share, of_faiss = ((got[:, :, None] == want[:, None]).any(-1).float().mean()
                       for got in (ours, theirs))  # fmt: skip
    assert share > of_faiss - 0.02
    assert c.nbytes(1, width) < index.index.sa_code_size()


@every_storage
def test_a_memory_decides_as_one_of_the_decoded_rows_would(name):
    """Written all at once, one by one, and by the reference: the same atoms."""
    centres = unit(6, 96, seed=8)
    x = normalize(centres[torch.arange(60) % 6] + 0.09 * draw(60, 96, seed=9), dim=-1)
    made = []
    for backend, size in (("auto", 60), ("auto", 1), ("reference", 7)):
        memory = StreamMemory(RSMConfig(96, tau=0.6, storage=name), backend=backend)
        made.append(torch.cat([memory.write(part[None]).atoms[0] for part in x.split(size)]))
    assert torch.equal(made[0], made[1])
    assert torch.equal(made[0], made[2])
    assert 6 <= len(made[0].unique()) < 30


@every_storage
def test_kernels_refuse_bits_by_name(name):
    with pytest.raises(ValueError, match=f"storage: '{name}' is held and searched on a CPU"):
        StreamMemory(RSMConfig(8, storage=name), backend="triton")
