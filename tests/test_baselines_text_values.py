"""What single memories under test answer, on streams small enough to see it."""

from __future__ import annotations

import pytest
import torch
from baselines_support import D, ask, queries, settings, stream, tokens, toy

from rsm_torch import AgentMemory, Item, RSMConfig
from rsm_torch.baselines.full_context import MARK, cut, without
from rsm_torch.baselines.methods import GROUPS, METHODS, Settings, make_memory, method_names
from rsm_torch.baselines.protocol import Memory
from rsm_torch.calibrate import calibrate_tau
from rsm_torch.embedders import FunctionEmbedder
from rsm_torch.lexical import LexicalIndex, fuse, searchable
from rsm_torch.text.ranking import AROUND

SPACE = [  # two directions; c0 and c1 lie near one, c2 and c3 near the other
    ("alpha one", [1.0, 0.0]),
    ("alpha two", [0.9, 0.1]),
    ("beta box", [0.0, 1.0]),
    ("beta", [0.1, 0.9]),
]


def filled(name, chunks, **more):
    memory = make_memory(name, settings(**more))
    memory.observe({"a": chunks})
    return memory


def ids(memory, query, budget=1000):
    return list(memory.context(query, budget).ids)


# -- without groups -------------------------------------------------------------------------


def test_no_memory():
    memory = filled("no-memory", toy(*SPACE))
    assert memory.context(ask("q", 1.0), 10).text == ""
    assert (memory.counts("a"), memory.nbytes()) == ((0, 0), 0)


def test_full_rag_is_the_order_of_cosines():
    memory = filled("full-rag", toy(*SPACE))
    assert ids(memory, ask("q", 1.0, 0.05)) == ["c0", "c1", "c3", "c2"]
    assert ids(memory, ask("q", 0.05, 1.0)) == ["c2", "c3", "c1", "c0"]
    assert (
        memory.context(ask("q", 1.0), 1000).text == "- alpha one\n- alpha two\n- beta\n- beta box"
    )
    assert memory.counts("a") == (4, 1)
    assert memory.nbytes() == 4 * (4 * D + 8)


def test_budget_rag_keeps_so_many():
    chunks = stream("a", 50, seed=4)
    memory = filled("budget-rag", chunks, budget_items=8)
    found = memory.context(queries("a")[0], 100_000).ids
    assert memory.counts("a") == (8, 1)
    assert len(found) == 8
    assert memory.nbytes() == 8 * (4 * D + 8)
    others = {filled("budget-rag", chunks, budget_items=8, seed=s).context(
        queries("a")[0], 100_000).ids for s in range(4)}  # fmt: skip
    assert len(others) == 4
    few = filled("budget-rag", chunks[:5], budget_items=8)
    assert set(few.context(queries("a")[0], 100_000).ids) == {c.id for c in chunks[:5]}


def test_bm25_rag_is_the_order_of_bm25_then_the_newest():
    memory = filled("bm25-rag", toy(*SPACE))
    assert ids(memory, ask("the box of alpha?", 1.0)) == ["c2", "c0", "c1", "c3"]
    assert ids(memory, ask("nothing", 1.0)) == ["c3", "c2", "c1", "c0"]
    assert memory.nbytes() > 0


def test_hybrid_rag_is_the_fusion():
    chunks = stream("a", 40, seed=5)
    dense, both = filled("full-rag", chunks), filled("hybrid-rag", chunks)
    index = LexicalIndex(map(searchable, chunks))
    for query in queries("a"):
        words = [chunks[place].id for place, _ in index.ranking(query.text)]
        expected = [id for id, _ in fuse([ids(dense, query, 100_000), words])]
        assert ids(both, query, 100_000) == expected
        assert expected != ids(dense, query, 100_000)
    assert both.nbytes() == dense.nbytes() + index.nbytes()


# -- the whole stream -----------------------------------------------------------------------


def test_full_context_is_the_stream_in_order():
    chunks = stream("a", 30, seed=6)
    memory = filled("full-context", chunks)
    context = memory.context(queries("a")[0], 100_000)
    assert context.ids == tuple(chunk.id for chunk in chunks)
    lines = context.text.split("\n")
    assert len(lines) == 30
    assert lines[0].startswith("[step 0, 2023-11-14 22:13, user] a saw amber")
    assert context.truncated == ()
    assert memory.nbytes() == 0
    exact = memory.context(queries("a")[0], context.tokens)
    assert (exact.text, exact.tokens) == (context.text, context.tokens)


@pytest.mark.parametrize("budget", [20, 60, 333, 699])
def test_full_context_over_the_budget_is_head_and_tail(budget):
    chunks = stream("a", 30, seed=6)
    memory = filled("full-context", chunks)
    whole = memory.context(queries("a")[0], 100_000).text
    context = memory.context(queries("a")[1], budget)
    head, tail = context.text.split(MARK)
    assert whole.startswith(head)
    assert tail.startswith(" ") or f"\n{tail}" in whole  # the rest of a line is no line of its own
    tail = tail.removeprefix(" ")
    assert whole.endswith(tail)
    assert 0.9 * budget - 2 <= context.tokens <= budget
    room = budget - tokens(MARK)
    assert 0.7 * room * 0.95 - 2 <= tokens(head) <= 0.7 * room
    assert 0.3 * room * 0.95 - 2 <= tokens(tail) <= 0.3 * room + 1
    shown = [chunk.id for chunk in chunks if chunk.text in head or chunk.text in tail]
    assert [id for id in context.ids if id not in context.truncated] == shown
    assert len(context.truncated) <= 2
    assert context.ids[-1] == chunks[-1].id


def test_full_context_of_a_long_stream_reads_little_of_the_middle():
    read = 0

    def count(text):
        nonlocal read
        read += len(text)
        return len(text.split())

    text = "word " * 1_000_000
    end, start = cut(text, 1000, count)
    assert count(without(text, end, start)) <= 1000
    assert end > 5 * 640
    assert read < 1_000_000


def test_full_context_follows_the_stream():
    chunks = stream("a", 30, seed=6)
    memory = filled("full-context", chunks[:3])
    assert len(ids(memory, queries("a")[0])) == 3
    memory.observe({"a": chunks[3:5]})
    assert len(ids(memory, queries("a")[0])) == 5


# -- groups ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rsm-full", "rsm-full-int8", "rsm-cent-merge", "rsm-cent-retr",
                                  "rsm-algorithm-e", "dp-means"])  # fmt: skip
def test_the_best_group_first_and_in_time_order_inside(name):
    memory = filled(name, toy(*SPACE, step=[0, 1, 2, 3]))
    context = memory.context(ask("q", 0.1, 0.9), 1000)
    assert context.text == (
        "## Group 1\n[step 2] beta box\n[step 3] beta\n"
        "## Group 2\n[step 0] alpha one\n[step 1] alpha two"
    )
    assert memory.counts("a") == (4, 2)
    assert ids(memory, ask("q", 0.1, 0.9), 15) == ["c3"]  # the nearest is admitted first


def test_the_gate_of_a_variant_decides():
    # A chain: each is near the one before, the last is far from the centroid of all.
    chain = [(f"t{n}", [torch.cos(torch.tensor(0.5 * n)), torch.sin(torch.tensor(0.5 * n))])
             for n in range(4)]  # fmt: skip
    assert filled("rsm-full", toy(*chain), tau=0.85).counts("a") == (4, 1)
    assert filled("rsm-cent-merge", toy(*chain), tau=0.85).counts("a") == (4, 2)


def test_groups_beyond_the_best_follow():
    rows = [(f"t{n}", [0.0] * n + [1.0] + [0.0] * (D - 1 - n)) for n in range(8)]
    memory = filled("rsm-full", toy(*rows), tau=0.9, top_groups=1)
    assert memory.counts("a") == (8, 8)
    query = ask("q", *[1.0 - 0.1 * n for n in range(8)])
    assert ids(memory, query) == [f"c{n}" for n in range(8)]


def test_storage_costs_what_it_says():
    chunks = stream("a", 40, seed=7)
    sizes = {name: filled(name, chunks).nbytes() for name in GROUPS["rsm"]}
    assert sizes["rsm-full-int8"] < 0.6 * sizes["rsm-full"]
    assert sizes["rsm-centroid"] < sizes["rsm-full-int8"]
    assert sizes["rsm-algorithm-e"] > sizes["rsm-full"]
    assert sizes["rsm-addressing"] == sizes["rsm-full"] + 40 * 2 * 8  # steps and times
    index = LexicalIndex(map(searchable, chunks))
    assert sizes["rsm-lexical"] == sizes["rsm-full"] + index.nbytes()


# -- as in the library ----------------------------------------------------------------------

BUDGETS = (15, 60, 200, 800, 20_000)
RANKS_ALONE = {"beside": 0, "brief": None}
PLAIN = {"addressing": False, "lexical": False, "around": 0, "top_atoms": 5, **RANKS_ALONE}
AS_AGENT_MEMORY = {
    "rsm-full": PLAIN,
    "rsm-cent-retr": PLAIN | {"atom_score": "centroid"},
    "rsm-around": PLAIN | {"around": AROUND},
    "rsm-lexical": PLAIN | {"lexical": True},
    "rsm-addressing": PLAIN | {"addressing": True},
    "rsm-context": {},
}


@pytest.fixture(scope="module")
def as_agents():
    """The same streams in an `AgentMemory`, with gates that open many atoms."""
    chunks = {name: stream(name, n, seed, centres=9) for seed, (name, n) in
              enumerate({"a": 90, "b": 25}.items(), 20)}  # fmt: skip
    asked = [query for name in chunks for query in queries(name)]
    known = {c.text: c.vector for some in chunks.values() for c in some}
    by_query: dict[str, torch.Tensor] = {}
    embedder = FunctionEmbedder(
        lambda texts: torch.stack([known.get(t, by_query.get(t, torch.ones(D))) for t in texts])
    )
    memory = AgentMemory(embedder, RSMConfig(D, tau=0.75), tokenizer=tokens)
    memory.add_many(
        {
            name: [Item(c.text, c.time, c.step, c.session, c.role) for c in some]
            for name, some in chunks.items()
        }
    )
    assert memory.counts()["a"].atoms > 6
    yield memory, by_query, chunks, asked
    memory.close()


@pytest.mark.parametrize("name", AS_AGENT_MEMORY)
@pytest.mark.parametrize("layout", ["grouped", "flat"])
def test_contexts_are_those_of_agent_memory(as_agents, name, layout):
    agent, by_query, chunks, asked = as_agents
    memory = make_memory(name, settings(tau=0.75, layout=layout))
    memory.observe(chunks)
    seen = set()
    for query, found in zip(asked, memory.contexts(asked, BUDGETS), strict=True):
        by_query.clear()
        by_query[query.text] = query.vector
        for budget, context in found.items():
            expected = agent.context(
                query.text, query.stream, budget, layout=layout, **AS_AGENT_MEMORY[name]
            )
            assert context.text == expected.text
            assert context.tokens == expected.tokens
            seen.add(context.text)
    assert len(seen) > 20


def test_named_steps_come_first():
    chunks = stream("a", 60, seed=8)
    far = ask("what happened at step 41 and at step 17?", *(-chunks[41].vector).tolist())
    assert "a/41" not in ids(filled("rsm-full", chunks), far, 120)
    for name in ("rsm-addressing", "rsm-addressing-lexical", "rsm-context", "rag-context"):
        memory = filled(name, chunks, layout="flat")
        assert set(ids(memory, far, 120)[:2]) == {"a/41", "a/17"}


# -- names and settings ---------------------------------------------------------------------


def test_names_of_methods():
    assert method_names("rsm-full") == ["rsm-full"]
    assert method_names(" oja, rsm-full ,oja") == ["oja", "rsm-full"]
    offline = method_names("all-offline,bm25-rag")
    assert offline == method_names("all-offline")
    assert len(offline) == 25
    assert method_names("all-llm") == ["a-mem", "memory-bank", "mem-gpt"]
    assert set(method_names("all")) == set(METHODS) == {*offline, *method_names("all-llm")}
    assert set(method_names("rsm,baselines")) == set(METHODS)
    assert not set(method_names("rsm")) & set(method_names("baselines"))


def test_unknown_names():
    with pytest.raises(ValueError, match=r"no method 'rsm-ful'; did you mean rsm-full"):
        method_names("oja,rsm-ful")
    with pytest.raises(ValueError, match=r"did you mean bm25-rag"):
        make_memory("bm25_rag", settings())
    with pytest.raises(ValueError, match="there are no-memory"):
        make_memory("zzzzzz", settings())
    with pytest.raises(ValueError, match="at least one name; groups are all"):
        method_names(" , ")
    with pytest.raises(TypeError, match="names with commas"):
        method_names(["oja"])
    with pytest.raises(TypeError, match="settings: expected Settings, got dict"):
        make_memory("oja", {})
    for name in method_names("all-llm"):
        with pytest.raises(ValueError, match=f"{name} is run by a language model"):
            make_memory(name, settings())


@pytest.mark.parametrize("name", GROUPS["all-llm"])
def test_memories_run_by_a_language_model_are_made_by_name(name):
    given = settings(chat=lambda messages: "{}", embed=lambda texts: torch.ones(len(texts), D))
    memory = make_memory(name, given)
    assert isinstance(memory, Memory)
    assert memory.name == name
    assert memory.counts("a") == (0, 0)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"dim": 0}, ValueError),
        ({"dim": 1.5}, TypeError),
        ({"tau": 1.5}, ValueError),
        ({"tau": float("nan")}, ValueError),
        ({"tau": None}, TypeError),
        ({"seed": -1}, ValueError),
        ({"tokenizer": 3}, TypeError),
        ({"layout": "grid"}, ValueError),
        ({"order": None}, ValueError),
        ({"top_groups": 0}, ValueError),
        ({"budget_items": True}, TypeError),
        ({"chat": "gpt"}, TypeError),
        ({"calibration": 0.5}, TypeError),
    ],
)
def test_settings_are_checked(given, error):
    with pytest.raises(error, match=next(iter(given))):
        settings(**given)


def test_a_calibration_of_another_width():
    found = calibrate_tau(torch.randn(4, D + 1), remove_mean=True)
    with pytest.raises(ValueError, match=r"calibration: its mean has width 17, not dim=16"):
        settings(calibration=found)
    assert Settings(dim=D, tokenizer=tokens, tau=0.5).layout is None


@pytest.mark.parametrize("name", ["rsm-full@timeline", "full-rag@grouped:best_last"])
def test_a_name_may_say_how_hits_are_packed(name):
    method, _, packing = name.partition("@")
    layout, _, order = packing.partition(":")
    assert method_names(f"{name},{method}") == [name, method]
    named = make_memory(name, settings())
    plain = make_memory(method, settings(layout=layout, order=order or "best_first"))
    other = make_memory(method, settings())
    assert named.name == name
    for memory in (named, plain, other):
        memory.observe({"a": stream("a", 12, seed=2)})
    asked = queries("a")[0]
    assert named.context(asked, 90).text == plain.context(asked, 90).text
    assert named.context(asked, 90).text != other.context(asked, 90).text


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("rsm-fll@flat", "did you mean rsm-full"),
        ("rsm-full@heap", "expected a layout of .*grouped.*, got 'heap'"),
        ("rsm-full@flat:best", "expected an order of best_first, best_last, got 'best'"),
        ("no-memory@flat", "has a form of its own; write 'no-memory'"),
    ],
)
def test_packings_that_there_are_not(name, says):
    with pytest.raises(ValueError, match=says):
        method_names(name)
    with pytest.raises(ValueError, match=says):
        make_memory(name, settings())
