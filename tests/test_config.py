import dataclasses
import json

import numpy as np
import pytest

from rsm_torch.config import RSMConfig


def test_json_round_trip():
    config = RSMConfig(dim=12, tau=0.5, rank=3, routing="centroid_first", storage="bfloat16")
    assert RSMConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_unknown_settings_are_refused():
    with pytest.raises(ValueError, match="unknown setting tao; the settings are dim, tau"):
        RSMConfig.from_dict({"dim": 3, "tao": 0.5})


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        RSMConfig(dim=3).tau = 0.1


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"dim": 0}, ValueError, "dim: expected an int of at least 1, got 0"),
        ({"dim": 3.0}, TypeError, "dim: expected an int of at least 1, got 3.0"),
        ({"dim": True}, TypeError, "dim: expected an int"),
        ({"dim": 4, "rank": 5}, ValueError, "rank: expected 1 <= rank <= dim=4, got 5"),
        ({"dim": 4, "rank": 0}, ValueError, r"rank: .* got 0"),
        ({"dim": 4, "energy": 0.0}, ValueError, r"energy: expected a share in \(0, 1\], got 0.0"),
        ({"dim": 4, "max_atoms": 0}, ValueError, "max_atoms: expected an int of at least 1, got 0"),
        ({"dim": 4, "max_members": 2.5}, TypeError, "max_members: expected an int .*, got 2.5"),
        ({"dim": 4, "ttl": 0}, ValueError, "ttl: expected seconds above 0, got 0"),
        ({"dim": 4, "members": "some"}, ValueError, "members: expected one of full, coefficients"),
        ({"dim": 4, "policy": "newest"}, ValueError, "policy: expected one of merge, ward, oldest"),
        ({"dim": 4, "tau": 1.01}, ValueError, r"tau: expected a cosine in \[-1, 1\], got 1.01"),
        ({"dim": 4, "tau": float("nan")}, ValueError, "tau: .* got nan"),
        ({"dim": 4, "tau": "0.8"}, TypeError, "tau: expected a float, got '0.8'"),
        ({"dim": 4, "gate": "member"}, ValueError, "gate: expected one of max_member, centroid"),
        ({"dim": 4, "storage": "float8"}, ValueError, "storage: expected one of .* got 'float8'"),
    ],
)
def test_bad_settings(settings, error, message):
    with pytest.raises(error, match=message):
        RSMConfig(**settings)


def test_numbers_of_other_libraries():
    config = RSMConfig(np.int64(4), tau=np.float32(0.5), rank=np.int32(2))
    assert (type(config.dim), type(config.tau), type(config.rank)) == (int, float, int)
    assert RSMConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_json_that_is_no_mapping():
    with pytest.raises((TypeError, ValueError), match="expected a mapping of settings"):
        RSMConfig.from_dict([])
