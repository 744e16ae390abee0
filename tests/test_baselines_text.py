"""What every memory under test must do, whatever it is."""

from __future__ import annotations

import pytest
import torch
from baselines_support import D, queries, settings, stream, tokens

from rsm_torch.baselines.methods import GROUPS, make_memory
from rsm_torch.baselines.protocol import Chunk, Memory, Query

OFFLINE = GROUPS["all-offline"]
RANKED = [name for name in OFFLINE if name not in ("no-memory", "full-context")]
STREAMS = {"u1": 30, "u10": 12, "u_1": 70, "U1": 1}
BUDGETS = (1, 7, 40, 150, 4000)

every = pytest.mark.parametrize("name", OFFLINE)


@pytest.fixture(scope="module")
def chunks():
    return {name: stream(name, n, seed) for seed, (name, n) in enumerate(STREAMS.items())}


@pytest.fixture(scope="module")
def filled(chunks):
    """One memory of each method; the tests only read them."""
    made: dict[str, Memory] = {}

    def get(name):
        if name not in made:
            made[name] = make_memory(name, settings())
            made[name].observe(chunks)
        return made[name]

    return get


def all_queries():
    return [query for name in STREAMS for query in queries(name)]


@every
def test_it_is_a_memory_of_its_name(filled, name):
    assert isinstance(filled(name), Memory)
    assert filled(name).name == name


@every
def test_a_budget_is_never_exceeded_and_what_is_said_is_true(filled, chunks, name):
    memory = filled(name)
    for query, found in zip(all_queries(), memory.contexts(all_queries(), BUDGETS), strict=True):
        texts = {chunk.id: chunk.text for chunk in chunks[query.stream]}
        assert list(found) == list(BUDGETS)
        for budget, context in found.items():
            assert context.max_tokens == budget
            assert context.tokens == (tokens(context.text) if context.text else 0) <= budget
            assert len(set(context.ids)) == len(context.ids)
            for id in context.ids:
                assert id in context.truncated or texts[id] in context.text
    assert found[1].text == ""


@pytest.mark.parametrize("name", [name for name in OFFLINE if name != "no-memory"])
def test_a_budget_is_used(filled, name):
    memory = filled(name)
    for query in queries("u_1"):
        assert memory.context(query, 150).tokens > 75
        held = memory.counts("u_1")[0]
        assert len(memory.context(query, 100_000).ids) == held > 0


@every
def test_many_queries_and_budgets_at_once_or_one_by_one(filled, name):
    memory = filled(name)
    together = memory.contexts(all_queries(), BUDGETS)
    apart = [{b: memory.context(query, b) for b in BUDGETS} for query in all_queries()]
    assert together == apart
    assert memory.contexts([], BUDGETS) == []
    assert memory.contexts(queries("u1"), []) == [{}, {}, {}]


@every
def test_streams_never_see_each_other(filled, chunks, name):
    among = filled(name)
    for own in STREAMS:
        alone = make_memory(name, settings())
        alone.observe({own: chunks[own]})
        asked = queries(own)
        for context in (c for found in among.contexts(asked, BUDGETS) for c in found.values()):
            assert all(id.startswith(f"{own}/") for id in context.ids)
            assert not any(f" {other} saw" in context.text for other in STREAMS if other != own)
        assert alone.contexts(asked, BUDGETS) == among.contexts(asked, BUDGETS)
        assert alone.counts(own) == among.counts(own)
        others = [other for other in STREAMS if other != own]
        assert [alone.counts(other) for other in others] == [(0, 0)] * len(others)
        assert [alone.context(q, 99).text for o in others for q in queries(o)] == [""] * 9


@every
def test_nothing_observed(name):
    memory = make_memory(name, settings())
    for chunks in ({}, {"a": []}):
        memory.observe(chunks)
        context = memory.context(queries("a")[0], 50)
        assert (context.text, context.tokens, context.ids) == ("", 0, ())
        assert memory.counts("a") == (0, 0)
        assert memory.nbytes() == 0


@every
def test_asking_changes_nothing(filled, name):
    memory = filled(name)
    before = memory.nbytes(), [memory.counts(s) for s in STREAMS]
    first = memory.contexts(all_queries(), BUDGETS)
    assert memory.contexts(all_queries(), BUDGETS) == first
    assert (memory.nbytes(), [memory.counts(s) for s in STREAMS]) == before


@every
def test_equal_seeds_give_equal_answers(filled, chunks, name):
    again = make_memory(name, settings())
    again.observe(chunks)
    assert again.contexts(all_queries(), BUDGETS) == filled(name).contexts(all_queries(), BUDGETS)
    assert again.nbytes() == filled(name).nbytes()


@every
def test_observed_in_parts_or_at_once(filled, chunks, name):
    parts = make_memory(name, settings())
    for start, stop in ((0, 5), (5, 31), (31, 70)):
        parts.observe({s: some[start:stop] for s, some in chunks.items()})
        parts.contexts(all_queries(), [60])
    assert parts.contexts(all_queries(), BUDGETS) == filled(name).contexts(all_queries(), BUDGETS)
    assert [parts.counts(s) for s in STREAMS] == [filled(name).counts(s) for s in STREAMS]


@every
def test_what_was_observed_before_counts_and_nothing_else(chunks, name):
    memory, short = make_memory(name, settings()), make_memory(name, settings())
    short.observe({"u1": chunks["u1"][:9]})
    memory.observe({"u1": chunks["u1"][:9]})
    asked = queries("u1")
    before = memory.contexts(asked, BUDGETS)
    assert before == short.contexts(asked, BUDGETS)
    memory.observe({"u1": chunks["u1"][9:]})
    if name != "no-memory":
        assert any(c.ids for found in before for c in found.values())
        assert memory.contexts(asked, [4000]) != short.contexts(asked, [4000])


@every
def test_a_calibration_and_layouts_are_taken(chunks, name):
    from rsm_torch.calibrate import calibrate_tau

    found = calibrate_tau(torch.stack([c.vector for c in chunks["u_1"]]), remove_mean=True)
    for layout in ("flat", "grouped", "timeline"):
        memory = make_memory(name, settings(calibration=found, layout=layout, order="best_last"))
        memory.observe(chunks)
        context = memory.context(queries("u_1")[0], 300)
        assert context.tokens <= 300
        if name in RANKED:
            assert ("## Group 1" in context.text) == (layout == "grouped")


# -- bad input ------------------------------------------------------------------------------

GOOD = Chunk("x", "text", torch.ones(D))
BAD_CHUNKS = {
    "not a mapping": ([GOOD], TypeError, "mapping"),
    "blank stream": ({" ": [GOOD]}, ValueError, "blank"),
    "no list": ({"u1": GOOD}, TypeError, "list of Chunk"),
    "no chunk": ({"u1": [GOOD, "text"]}, TypeError, r"\['u1'\]\[1\]: expected a Chunk, got str"),
    "same id twice": ({"u1": [GOOD, GOOD]}, ValueError, r"\[1\]: the stream has a chunk 'x'"),
    "id held": ({"u1": [Chunk("u1/0", "", torch.ones(D))]}, ValueError, "has a chunk 'u1/0'"),
    "id no str": ({"u1": [Chunk(3, "", torch.ones(D))]}, TypeError, r"id: expected a str, got 3"),
    "width": ({"u1": [Chunk("x", "", torch.ones(D + 1))]}, ValueError, r"\(16,\), got \(17,\)"),
    "dtype": ({"u1": [Chunk("x", "", torch.ones(D).int())]}, TypeError, "floating tensor"),
    "nan": ({"u1": [Chunk("x", "", torch.full((D,), torch.nan))]}, ValueError, "NaN.* at 0"),
    "zero": ({"u1": [GOOD, Chunk("y", "", torch.zeros(D))]}, ValueError, "zero at 1"),
}  # fmt: skip


@every
@pytest.mark.parametrize("case", BAD_CHUNKS)
def test_bad_chunks_are_refused_and_change_nothing(chunks, name, case):
    given, error, message = BAD_CHUNKS[case]
    memory = make_memory(name, settings())
    memory.observe({"u1": chunks["u1"][:3]})
    if name == "no-memory" and case == "id held":
        return  # it holds none
    before = memory.contexts(queries("u1"), [90]), memory.counts("u1"), memory.nbytes()
    if isinstance(given, dict):
        given = {"u10": chunks["u10"]} | given
    with pytest.raises(error, match=message):
        memory.observe(given)
    assert memory.counts("u10") == (0, 0)
    assert (memory.contexts(queries("u1"), [90]), memory.counts("u1"), memory.nbytes()) == before


@every
def test_bad_queries_are_refused(filled, name):
    memory, good = filled(name), queries("u1")[0]
    for query, error, message in (
        ("text", TypeError, "expected a Query, got str"),
        (Query(" ", "u1", good.vector), ValueError, "not blank"),
        (Query("q", "u1", torch.ones(3)), ValueError, r"\(16,\), got \(3,\)"),
        (Query("q", "u1", torch.zeros(D)), ValueError, "zero"),
        (Query("q", "u1", torch.full((D,), torch.inf)), ValueError, "infinite"),
    ):
        with pytest.raises(error, match=message):
            memory.context(query, 50)
    for budget, error in ((0, ValueError), (-3, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match="max_tokens"):
            memory.context(good, budget)


@pytest.mark.parametrize("name", ["full-rag", "bm25-rag", "rsm-full", "rsm-addressing-lexical"])
def test_rankings_are_those_that_contexts_are_packed_from(name):
    memory = make_memory(name, settings(layout="flat"))
    memory.observe({"a": stream("a", 20, seed=1), "b": stream("b", 6, seed=2)})
    asked = [*queries("a"), *queries("b"), Query("?", "never", queries("a")[0].vector)]
    rankings = memory.rankings(asked)
    assert [len(set(ranking)) for ranking in rankings] == [20] * 3 + [6] * 3 + [0]
    everything = [memory.context(query, 100_000).ids for query in asked]
    assert [list(ids) for ids in everything] == rankings
    memory.observe({"b": stream("b", 3, seed=5)[:0] + stream("c", 2, seed=7)})
    assert [len(ranking) for ranking in memory.rankings(asked)] == [20] * 3 + [8] * 3 + [0]
