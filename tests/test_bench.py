"""`rsm bench`: its figures agree with one another, and it refuses to time what is wrong."""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from cli_support import refused, rsm

from benchmarks.side_by_side import parity, search, skew, timing, write
from benchmarks.side_by_side.job import Job, prepare
from benchmarks.side_by_side.peak import can_measure, peak_growth
from benchmarks.side_by_side.streams import TAU, draw
from benchmarks.side_by_side.timing import Absent, Row, System, as_json, measure
from rsm_kernels.merge_gate import host
from rsm_torch import provenance
from rsm_torch import search as searching

TINY = ("--held", 20, "--dim", 16, "--repeats", 2)
MODULES = {"faiss": "faiss", "birch": "sklearn", "minibatch": "sklearn", "dbstream": "river"}
WRITE_ROWS = {
    "faiss": ["faiss", "faiss + centroids"],
    "birch": ["birch, one by one", "birch, by block"],
    "minibatch": ["minibatch k-means"],
    "dbstream": ["dbstream"],
}


def steps(turns, title, total):
    assert len(list(turns)) == total
    return iter(turns)


def job(**sizes) -> Job:
    return Job(**{"streams": 3, "held": 40, "dim": 32, "tau": TAU, "storage": "float32",
                  "seed": 0, **sizes})  # fmt: skip


def check_rows(shape: dict, unit: str, amount: int, repeats: int) -> None:
    first = shape["rows"][0]["median_seconds"]
    for row in shape["rows"]:
        if row["median_seconds"] is None:
            assert row["note"] == timing.INSTALL
            assert row["ratio"] is row["state_bytes"] is None
            continue
        assert len(row["seconds"]) == repeats
        assert min(row["seconds"]) > 0
        assert row["median_seconds"] == statistics.median(row["seconds"])
        assert row["ratio"] == pytest.approx(row["median_seconds"] / first)
        assert row[f"{unit}_per_second"] == pytest.approx(amount / row["median_seconds"])
        assert row["state_bytes"] > 0
        assert (row["peak_bytes"] is not None) == can_measure()
        assert 0 < row["timed_share"] <= 1
    assert shape["rows"][0]["ratio"] == 1


# -- write ------------------------------------------------------------------------------------


def test_write_has_every_row_asked_for_and_its_figures_agree(tmp_path):
    out = tmp_path / "write.json"
    result = rsm("bench", "write", "--streams", "2,10", *TINY, "--chunks", 4, "--out", out,
                 "--backends", "numpy,reference", "--json")  # fmt: skip
    found = json.loads(result.stdout)
    assert [shape["streams"] for shape in found["shapes"]] == [2, 10]
    own = ["rsm numpy", "rsm reference", "rsm numpy, one by one"]
    for shape in found["shapes"]:
        names = [row["name"] for row in shape["rows"]]
        assert names == [*own, *(name for peer in WRITE_ROWS.values() for name in peer)]
        check_rows(shape, "chunks", shape["streams"] * 4, 2)
        by_name = {row["name"]: row for row in shape["rows"]}
        for name in own:
            assert by_name[name]["agrees"] == 1
            assert by_name[name]["state_bytes"] == by_name[own[0]]["state_bytes"]
        if importlib.util.find_spec("faiss"):
            assert by_name["faiss + centroids"]["agrees"] == 1
            assert by_name["faiss"]["state_bytes"] == shape["streams"] * 20 * 16 * 4
        if importlib.util.find_spec("sklearn"):
            assert by_name["birch, by block"]["timed_share"] == min(1, 8 / shape["streams"])
    settings = {"tau": TAU, "storage": "float32", "seed": 0, "repeats": 2}
    assert found["settings"] == settings
    assert found["machine"]["torch_threads"] == torch.get_num_threads()
    assert found["versions"]["torch"] == torch.__version__
    assert found["parity"]["compared"] > 500
    assert json.loads(out.read_text()) == found


def test_write_for_people():
    shown = rsm("bench", "write", "--streams", 1, *TINY, "--chunks", 2, "--peers", "none",
                "--storage", "bfloat16")  # fmt: skip
    assert shown.exit_code == 0, shown.output
    assert "write: 1 streams, 20 held in" in shown.stdout
    assert "rsm numpy" in shown.stdout
    assert "faiss  " not in shown.stdout
    assert "results equal to the reference's" in shown.stdout


def test_growth_compares_few_members_with_many():
    found = write.growth(job(chunks=4), "numpy", 3, steps, sizes=(30, 90))
    assert found["held"] == [30, 90]
    medians = [statistics.median(seconds) for seconds in found["seconds"]]
    assert found["seconds_per_chunk"] == pytest.approx([m / 4 for m in medians])
    assert found["ratio"] == pytest.approx(medians[1] / medians[0])


def test_every_repetition_starts_from_the_same_state():
    prepared = prepare(job(chunks=5))
    own = write.Own(prepared)
    systems = [own.block("numpy"), own.one_by_one("numpy")]
    for peer in write.PEERS.values():
        systems += [s for s in peer(prepared) if isinstance(s, System)]
    for system in systems:
        results = []
        for _ in range(2):
            system.prepare()
            results.append(system.run())
        assert results[0] is None or np.array_equal(*results), system.name
    own.back()
    assert prepared.memory.counts().members.tolist() == [40] * 3


@pytest.mark.parametrize("peer", WRITE_ROWS)
def test_a_peer_that_is_not_installed_has_a_row_that_says_so(peer, monkeypatch):
    monkeypatch.setattr(parity, "check_write", lambda backends: parity.Checked(0, 0))
    monkeypatch.setitem(sys.modules, MODULES[peer], None)
    result = rsm("bench", "write", "--streams", 2, *TINY, "--chunks", 2, "--peers", peer, "--json")
    assert result.exit_code == 0, result.output
    shape = json.loads(result.stdout)["shapes"][0]
    missing = shape["rows"][2:]
    assert [row["name"] for row in missing] == WRITE_ROWS[peer]
    assert {row["note"] for row in missing} == {"not installed: pip install rsm-torch[eval]"}
    check_rows(shape, "chunks", 4, 2)
    for absent in missing:
        assert absent["seconds"] == []


# -- search -----------------------------------------------------------------------------------


def test_search_has_every_row_asked_for_and_its_figures_agree():
    result = rsm("bench", "search", "--streams", 3, *TINY, "--queries", 2, "--top-k", 4,
                 "--top-atoms", 20, "--json")  # fmt: skip
    found = json.loads(result.stdout)
    (shape,) = found["shapes"]
    names = ["rsm", "faiss, a loop", "torch, a loop", "torch, batched", "bm25s, a loop"]
    assert [row["name"] for row in shape["rows"]] == names
    check_rows(shape, "queries", 6, 2)
    # With every atom looked into, this project and plain products find the same members.
    by_name = {row["name"]: row for row in shape["rows"]}
    assert by_name["torch, batched"]["agrees"] == by_name["torch, a loop"]["agrees"] == 1
    if importlib.util.find_spec("faiss"):
        assert by_name["faiss, a loop"]["agrees"] == 1
    assert by_name["bm25s, a loop"]["agrees"] is None
    assert shape["top_k"] == 4


def test_overlap_counts_ids_whatever_their_order_and_stream():
    agree = search.overlap(held=10)
    own = np.array([[[3, 1, -1]], [[12, 15, 18]]])
    assert agree(own, own) == 1
    assert agree(own, np.array([[[1, 3, 7]], [[2, 5, 9]]])) == pytest.approx((1 + 2 / 3) / 2)


@pytest.mark.parametrize(("module", "peer", "rows"), [("faiss", "faiss", 1), ("bm25s", "bm25s", 1)])
def test_search_without_a_peer(module, peer, rows, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    result = rsm("bench", "search", "--streams", 2, *TINY, "--peers", peer, "--json")
    shape = json.loads(result.stdout)["shapes"][0]
    assert [row["note"] for row in shape["rows"][1:]] == [timing.INSTALL] * rows


# -- skew -------------------------------------------------------------------------------------


def test_skew_measures_every_shape_and_its_figures_agree(tmp_path):
    out = tmp_path / "skew.json"
    result = rsm("bench", "skew", "--streams", 5, "--giant", 300, "--dim", 16, "--singles", 20,
                 "--repeats", 2, "--out", out, "--json")  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert json.loads(out.read_text()) == found
    assert [shape["shape"] for shape in found["shapes"]] == list(skew.SHAPES)
    held = (300 + 4 * 20) // 5
    for shape in found["shapes"]:
        counts = skew.lengths(shape["shape"], 5, held, 300)
        assert (shape["chunks"], shape["longest"]) == (counts.sum(), counts.max())
        assert shape["live"] <= shape["allocated"] <= shape["reserved"]
        assert shape["allocated_over_live"] == shape["allocated"] / shape["live"]
        assert shape["reserved_over_live"] == shape["reserved"] / shape["live"]
        assert shape["chunks_per_second"].keys() == {"1", "32"}
    assert found["shapes"][0]["times_equal"] == {"1": 1, "32": 1}
    texts = found["texts"]
    assert (texts["streams"], texts["giant"], texts["adds"]) == (5, 300, 20)
    assert texts["ram"]["slowest_seconds"] >= texts["ram"]["median_seconds"] > 0
    assert texts["file"]["adds_per_second"] > 0
    assert texts["opening"]["first_search_bytes"] >= texts["opening"]["bytes"] >= 0
    one, fork = found["singles"], found["fork"]
    assert (one["held"], one["writes"]) == (512, 20)
    assert one["slowest_over_median"] == one["slowest_seconds"] / one["median_seconds"] >= 1
    assert fork["share_of_stream"] < 0.2  # the facts of its rows; at 16 wide these count
    for name, streams in (("small", 1), ("large", 256)):
        row = found["busy"][name]
        assert (row["streams"], row["chunks"]) == (streams, 32)
        times = row["busy"]
        cores = str(found["busy"]["cores"])
        assert row["busy_default_over_one"] == pytest.approx(times[cores] / times["1"])


def test_skew_draws_the_lengths_it_says():
    assert skew.lengths("equal", 4, 30, 900).tolist() == [30] * 4
    assert skew.lengths("one giant", 4, 30, 900).tolist() == [900, 20, 20, 20]
    zipf = skew.lengths("zipf", 4, 25, 900)
    assert zipf.tolist() == [48, 24, 16, 12]
    source = skew.Source(4, 8, seed=0)
    written = np.zeros(4, int)
    for x, slots, n in skew.rounds(source, zipf):
        assert x.shape == (len(slots), max(n), 8)
        written[slots] += n
    assert written.tolist() == zipf.tolist()


# -- refusals ---------------------------------------------------------------------------------


def test_write_refuses_a_backend_that_decides_otherwise(monkeypatch):
    right = host.by_pieces

    def wrong(*of, **how):
        decided = right(*of, **how)
        for one in decided:
            one.atoms[-1] = 0
        return decided

    monkeypatch.setattr(host, "by_pieces", wrong)
    monkeypatch.setattr(write, "run", lambda *_: pytest.fail("timed all the same"))
    line = refused(rsm("bench", "write", "--streams", 2, *TINY))
    assert "backend 'numpy' decides" in line
    assert "otherwise than 'reference'" in line
    assert line.endswith("not timed")


@pytest.mark.parametrize("fault", ["scores", "places"])
def test_search_refuses_a_backend_that_finds_otherwise(fault, monkeypatch):
    right = searching.search

    def wrong(state, q, slots, read, backend, threads):
        found = right(state, q, slots, read, backend, threads)
        if backend == "reference":
            return found
        if fault == "scores":
            return replace(found, scores=found.scores + np.float32(1e-4))
        return replace(found, ids=found.ids[..., ::-1].copy())

    monkeypatch.setattr(searching, "search", wrong)
    line = refused(rsm("bench", "search", "--streams", 2, *TINY))
    assert "search finds other members than 'reference'" in line


def test_parity_meets_atoms_that_merge_and_open():
    assert parity.check_write(["numpy"]).cases == len(parity.CASES) == 4
    for config in parity.CASES:
        atoms = parity._one_by_one(config, parity._rows(0, parity.HELD + parity.NEW))
        most = atoms.max(1).values + 1
        assert (most > 1).all()
        assert (most < parity.HELD).all()


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("write", ("--streams", "4,x"), "--streams: expected whole numbers of at least 1, got '4,x'"),
        ("write", ("--held", "0"), "--held: expected whole numbers of at least 1, got '0'"),
        ("write", ("--chunks", 0), "--chunks: expected at least 1, got 0"),
        ("write", ("--dim", -1), "--dim: expected at least 1, got -1"),
        ("write", ("--repeats", 0), "--repeats: expected at least 1, got 0"),
        ("write", ("--tau", 1.5), "--tau: expected a cosine in (0, 1), got 1.5"),
        ("write", ("--storage", "int3"), "expected one of float32, float16, bfloat16, int8, bits1, bits2, bits3, bits4, pq, got 'int3'"),
        ("write", ("--peers", "faiss,redis"), "--peers: expected some of faiss, birch, "),
        ("write", ("--backends", "fast"), "--backends: expected some of reference, numpy, triton, "),
        ("write", ("--out", "no/such/folder/x.json"), "--out: no folder "),
        ("write", ("--out", "."), "--out: . is a folder"),
        ("skew", ("--giant", 0), "--giant: expected at least 1, got 0"),
        ("skew", ("--storage", "int3"), "expected one of float32, float16, bfloat16, int8, bits1, bits2, bits3, bits4, pq, got 'int3'"),
        ("search", ("--queries", 0), "--queries: expected at least 1, got 0"),
        ("search", ("--held", 5), "--top-k: expected at most --held, 5, got 10"),
        ("search", ("--peers", "birch"), "--peers: expected some of faiss, torch, bm25s, got"),
    ],
)  # fmt: skip
def test_bad_options_are_refused_in_one_line(command, options, message):
    assert message in refused(rsm("bench", command, *options))


def test_a_backend_that_cannot_run_here_is_refused_with_its_reason(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    line = refused(rsm("bench", "write", "--backends", "triton"))
    assert "backend: 'triton' cannot run" in line


# -- the parts --------------------------------------------------------------------------------


def test_systems_take_turns_after_a_round_that_is_not_timed():
    calls = []
    systems = [
        System("a", lambda: calls.append("a"), 1, lambda: calls.append("-")),
        Absent("x"),
        System("b", lambda: calls.append("b"), 2, share=0.5, note="half"),
    ]
    rows = measure(systems, 3, steps, "test", lambda first, other: 1.0)
    assert "".join(calls[:12]) == "-ab" * 4
    assert [row.name for row in rows] == ["a", "x", "b"]
    assert [len(row.seconds) for row in rows] == [3, 0, 3]
    assert rows[1].median is None
    assert (rows[2].share, rows[2].note, rows[2].state_bytes) == (0.5, "half", 2)


def test_the_time_of_a_part_is_scaled_to_the_whole(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(timing, "perf_counter", lambda: float(next(clock)))
    systems = [System("all", lambda: None, 1), System("some", lambda: None, 1, share=0.25)]
    rows = measure(systems, 1, steps, "test", lambda first, other: 1.0)
    assert [row.seconds for row in rows] == [[1.0], [4.0]]


def test_medians_and_ratios():
    rows = [Row("a", "", [2.0, 1.0, 9.0]), Row("b", "", [6.0, 8.0]), Row("c", timing.INSTALL)]
    a, b, c = as_json(rows, "chunks", 100)
    assert (a["median_seconds"], a["ratio"], a["chunks_per_second"]) == (2, 1, 50)
    assert (b["median_seconds"], b["ratio"]) == (7, 3.5)
    assert c["ratio"] is c["median_seconds"] is c["chunks_per_second"] is None


@pytest.mark.skipif(not can_measure(), reason="no peak of resident memory that can be reset here")
def test_peak_sees_what_a_call_needs_and_gives_back():
    size = 64 << 20
    held = []
    grown = peak_growth(lambda: np.ones(size, np.uint8).sum())
    assert 0.9 * size < grown < 1.3 * size
    assert peak_growth(lambda: held.append(1)) < 0.1 * size


def test_streams_are_what_they_are_said_to_be():
    streams = draw(3, 200, 16, 384, seed=3)
    assert streams.held.shape == (3, 200, 384)
    x = torch.cat([streams.held, streams.new], 1)
    assert torch.allclose(x.norm(dim=-1), torch.ones(3, 216), atol=1e-5)
    cosines = x @ x.mT
    near = (cosines > TAU) & ~torch.eye(216, dtype=torch.bool)
    assert ((near.sum(-1) == 0).sum(1) == 10).all()  # strays
    assert cosines[near].mean() == pytest.approx(0.8, abs=0.01)
    assert cosines[~near & (cosines < 0.99)].abs().max() < 0.4
    again = draw(3, 200, 16, 384, seed=3)
    assert torch.equal(streams.new, again.new)
    assert prepare(job(held=200, dim=384, chunks=16)).start[0].atoms in range(30, 35)


def test_provenance_names_machine_versions_and_commit(monkeypatch):
    found = provenance.provenance()
    assert found["machine"]["cpu"]
    assert found["versions"]["numpy"] == np.__version__
    monkeypatch.setattr(provenance, "_git", lambda *_: None)
    assert provenance.commit() is None
