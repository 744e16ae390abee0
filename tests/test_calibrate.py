import math

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from rsm_torch.calibrate import Calibration, calibrate_tau
from rsm_torch.config import RSMConfig
from rsm_torch.memory import StreamMemory


def test_the_quantile_of_pairwise_cosines():
    x = torch.randn(20, 8)
    unit = normalize(x.double(), dim=-1).numpy()
    cosines = (unit @ unit.T)[np.triu_indices(20, 1)]
    for q in (0.0, 0.7, 1.0):
        assert calibrate_tau(x, quantile=q).tau == pytest.approx(np.quantile(cosines, q), abs=1e-6)


def test_two_examples_and_bf16():
    x = torch.tensor([[1.0, 0.0], [1.0, 1.0]], dtype=torch.bfloat16)
    found = calibrate_tau(x)
    assert found.tau == pytest.approx(math.sqrt(0.5), abs=1e-6)
    assert found.examples == 2


def test_many_examples_are_sampled_reproducibly():
    x = torch.randn(5000, 16)
    one, two = calibrate_tau(x), calibrate_tau(x)
    other = calibrate_tau(x, generator=torch.Generator().manual_seed(7))
    assert one.examples == 50
    assert one.tau == two.tau != other.tau


def test_only_pairs_within_a_stream_count():
    # Two streams at right angles, each of its own two rows at 60°.
    x = torch.tensor([[1, 0, 0, 0], [0.5, 0.75**0.5, 0, 0], [0, 0, 1, 0], [0, 0, 0.5, 0.75**0.5]])
    groups = torch.tensor([7, 7, 2, 2])
    assert calibrate_tau(x, quantile=0.0, groups=groups).tau == pytest.approx(0.5)
    assert calibrate_tau(x, quantile=0.0).tau == pytest.approx(0.0)


@pytest.mark.parametrize(("streams", "each", "used"), [(1, 90, 50), (16, 9, 48), (400, 2, 50)])
def test_the_sample_is_spread_over_streams(streams, each, used):
    groups = torch.arange(streams).repeat_interleave(each)
    assert calibrate_tau(torch.randn(len(groups), 8), groups=groups).examples == used


@pytest.mark.parametrize(
    ("x", "options", "error", "message"),
    [
        (torch.randn(3, 4), {"groups": torch.arange(3)}, ValueError, "no group has 2 examples"),
        (
            torch.randn(3, 4),
            {"groups": torch.arange(2)},
            ValueError,
            "groups: expected one for each of 3 examples, got 2",
        ),
        (torch.randn(1, 4), {}, ValueError, r"at least 2 examples, \[n, D\], got shape \(1, 4\)"),
        (torch.ones(3, 4, dtype=torch.int64), {}, TypeError, "x: expected a floating dtype"),
        (torch.tensor([[1.0, 0], [0, 0]]), {}, ValueError, r"\[1 \(zero\)\]"),
        (torch.randn(9, 4), {"quantile": 70}, ValueError, r"quantile: .*\[0, 1\], got 70"),
        (torch.randn(9, 4), {"sample": 1}, ValueError, "sample: expected an int of at least 2"),
        (torch.randn(9, 4), {"remove_directions": 4}, ValueError, "remove_directions: .* got 4"),
    ],
)
def test_bad_input(x, options, error, message):
    with pytest.raises(error, match=message):
        calibrate_tau(x, **options)


def anisotropic(n: int, seed: int) -> torch.Tensor:
    """Two clusters far from the origin: raw cosines are all near 1, as of raw hidden states."""
    g = torch.Generator().manual_seed(seed)
    sign = torch.where(torch.arange(n) % 2 == 0, 1.0, -1.0)
    x = 0.2 * torch.randn(n, 6, generator=g)
    x[:, 1] += sign
    x[:, 0] += 30
    return x


def test_the_transform_is_applied_on_write_and_search_and_saved(tmp_path):
    calibration = calibrate_tau(anisotropic(50, 0), remove_mean=True)
    assert calibrate_tau(anisotropic(50, 0)).tau > 0.99
    x = anisotropic(40, 1)
    memory = StreamMemory(RSMConfig(6, tau=0.5), calibration=calibration)
    atoms = memory.write(x[None]).atoms[0]
    assert atoms.tolist() == [0, 1] * 20
    assert memory.search(x[None, 3]).ids[0, 0] == 3
    memory.save_pretrained(tmp_path)
    again = StreamMemory.from_pretrained(tmp_path)
    torch.testing.assert_close(again.calibration.mean, calibration.mean)
    assert torch.equal(again.search(x[None, :9]).scores, memory.search(x[None, :9]).scores)


def test_directions_are_removed():
    x = torch.randn(50, 6)
    x[:, 2] *= 100
    found = calibrate_tau(x, remove_mean=True, remove_directions=1)
    left = found.transform(torch.randn(9, 6))
    assert found.directions.shape == (1, 6)
    assert (left @ found.directions.mT).abs().max() < 1e-5
    torch.testing.assert_close(found.directions @ found.directions.mT, torch.eye(1))


def test_a_row_the_transform_leaves_nothing_of():
    calibration = Calibration(0.5, 0.7, 2, mean=torch.ones(3))
    memory = StreamMemory(RSMConfig(3), calibration=calibration)
    with pytest.raises(
        ValueError, match=r"x after the calibration's transform: .*\[0, 1 \(zero\)\]"
    ):
        memory.write(torch.tensor([[[1.0, 2, 3], [1, 1, 1]]]))
    assert memory.counts().members.tolist() == [0]


def test_file_round_trip(tmp_path):
    found = calibrate_tau(torch.randn(30, 5), remove_mean=True, remove_directions=2, embedder="e")
    found.save(tmp_path / "c.json")
    again = Calibration.load(tmp_path / "c.json")
    assert (again.tau, again.embedder, again.examples) == (found.tau, "e", 30)
    assert torch.equal(again.mean, found.mean)
    assert torch.equal(again.directions, found.directions)


@pytest.mark.parametrize("text", ['{"tau": 0.5', "[1, 2]", '{"tau": 0.5, "no": 1}'])
def test_foreign_files(tmp_path, text):
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(ValueError, match="calibration"):
        Calibration.load(tmp_path / "c.json")


def test_width_is_checked():
    with pytest.raises(ValueError, match="mean has width 3, not dim=4"):
        StreamMemory(RSMConfig(4), calibration=Calibration(0.5, 0.7, 2, mean=torch.ones(3)))


@pytest.mark.parametrize("field", [{"tau": "x"}, {"tau": 5}, {"tau": math.nan}, {"examples": 1},
                                   {"quantile": 2}, {"embedder": 3}, {"mean": [math.inf]},
                                   {"directions": [1.0]}])  # fmt: skip
def test_fields_are_checked(field):
    with pytest.raises(ValueError, match=f"calibration: {next(iter(field))} must be"):
        Calibration.from_dict({"tau": 0.5, "quantile": 0.7, "examples": 3} | field)
