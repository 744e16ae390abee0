"""LangGraph's store: like its own in-memory one, whatever is asked; namespaces apart; times to live."""

from __future__ import annotations

import asyncio
import itertools
import string
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from text_support import Clock, Hashed, break_commits

pytest.importorskip("langgraph.store.base")

from langgraph.store.base import (
    GetOp,
    InvalidNamespaceError,
    ListNamespacesOp,
    MatchCondition,
    PutOp,
    SearchOp,
)
from langgraph.store.memory import InMemoryStore

from rsm_torch.integrations.langgraph import KIND, RSMStore
from rsm_torch.integrations.streams import nearest, parts_of, stream_of
from rsm_torch.text import AgentMemory

CALM = settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
HOSTILE = st.one_of(
    st.sampled_from(['a', 'b', 'a.b', 'a","b', '["a"]', ' a', 'a ', '\\', '"', "'", "a\x00", "*", "langgraph:", "\ud800"]),
    st.text(min_size=1, max_size=6),
)  # fmt: skip
NAMESPACES = st.lists(HOSTILE, min_size=1, max_size=3).map(tuple)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def memory(clock):
    with AgentMemory(Hashed(), tau=0.5, clock=clock) as memory:
        yield memory


@pytest.fixture
def store(memory):
    return RSMStore(memory, fields=["text"])


def keys(found) -> list[str]:
    return [item.key for item in found]


# -- namespaces and keys ----------------------------------------------------------------------------


@CALM
@given(st.lists(st.tuples(NAMESPACES, HOSTILE), min_size=2, max_size=8, unique=True))
def test_hostile_namespaces_and_keys_are_apart(places):
    with AgentMemory(Hashed(), tau=0.5) as memory:
        store = RSMStore(memory)
        for n, (namespace, key) in enumerate(places):
            store.batch([PutOp(namespace, key, {"n": n})])
        for n, (namespace, key) in enumerate(places):
            (item,) = store.batch([GetOp(namespace, key)])
            assert (item.namespace, item.key, item.value) == (namespace, key, {"n": n})
            for query in (None, "n"):
                (found,) = store.batch([SearchOp(namespace, limit=99, query=query)])
                under = {p for p in places if p[0][: len(namespace)] == namespace}
                assert {(one.namespace, one.key) for one in found} == under
                assert len(found) == len(under)
        (listed,) = store.batch([ListNamespacesOp(limit=99)])
        assert listed == sorted({namespace for namespace, _ in places})
        gone, key = places[0]
        store.batch([PutOp(gone, key, None)])
        left = store.batch([GetOp(*place) for place in places])
        assert [item is None for item in left] == [place == places[0] for place in places]


@CALM
@given(st.lists(st.one_of(HOSTILE, st.just("")), max_size=4), st.text(max_size=8))
def test_names_of_streams_come_back(parts, other):
    name = stream_of(KIND, parts)
    assert parts_of(KIND, name) == tuple(parts)
    assert name.strip() == name
    assert name.isascii()
    assert parts_of(KIND, other) is None or other.startswith(KIND)
    assert parts_of(KIND, f"{name} ") is None
    assert parts_of(KIND, f"x{name}") is None


def test_other_streams_are_not_seen(store, memory):
    memory.add("a private note", stream="ada")
    memory.add("another", stream='langgraph:["ada", 1]')
    memory.add("another", stream='langgraph:["ada" ]')
    memory.add("another", stream="langgraph:[null]")
    assert store.search((), query="a private note") == store.search(()) == []
    assert store.list_namespaces() == []


def test_items_that_no_store_wrote_are_not_seen(store, memory):
    store.put(("u",), "k", {"text": "a"})
    memory.add("b", stream=stream_of(KIND, ["u"]))
    memory.put("c", stream=stream_of(KIND, ["u"]), key='"c"')
    assert keys(store.search(())) == keys(store.search((), query="b", limit=2)) == ["k"]
    assert store.get(("u",), "c") is None


def test_namespaces_that_cannot_be(store):
    for namespace in ("ada", ("",), (1,)):
        for op in (PutOp(namespace, "k", {}), GetOp(namespace, "k"), SearchOp(namespace)):
            with pytest.raises(InvalidNamespaceError, match="namespace"):
                store.batch([op])
    with pytest.raises(InvalidNamespaceError):
        store.put(("a.b",), "k", {})
    with pytest.raises(InvalidNamespaceError):
        store.put((), "k", {})


# -- like LangGraph's own store -----------------------------------------------------------------------

LABELS = st.sampled_from(["a", "b", "c"])
PLACES = st.lists(LABELS, min_size=1, max_size=3).map(tuple)
FIELDS = st.sampled_from(["x", "y", "step", "session", "role", "ttl", "written", "unindexed", "$z"])
SCALARS = st.one_of(st.none(), st.integers(-2, 2), st.sampled_from(["", "p", "q"]))
SHALLOW = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=2),
    st.dictionaries(st.sampled_from("uv"), SCALARS, max_size=2),
)
VALUES = st.one_of(
    SHALLOW,
    st.lists(SHALLOW, max_size=2),
    st.dictionaries(st.sampled_from("uv"), SHALLOW, max_size=2),
)
ITEMS = st.builds(
    lambda text, rest: rest if text is None else {**rest, "text": text},
    st.one_of(st.none(), st.text(string.ascii_lowercase, min_size=3, max_size=5)),
    st.dictionaries(FIELDS, VALUES, max_size=3),
)
WANTED = st.one_of(
    VALUES,
    st.tuples(st.sampled_from(["$eq", "$ne"]), SCALARS).map(lambda pair: dict([pair])),
)
FILTERS = st.one_of(
    st.none(), st.dictionaries(FIELDS.filter(lambda f: f[0] != "$"), WANTED, max_size=2)
)
PUTS = st.builds(
    PutOp, PLACES, LABELS, st.one_of(st.none(), ITEMS), st.sampled_from([None, False]), st.none()
)
READS = st.one_of(
    st.builds(GetOp, PLACES, LABELS),
    st.builds(
        SearchOp, st.one_of(st.just(()), PLACES), FILTERS, st.integers(1, 40), st.just(0),
        st.one_of(st.none(), st.text(string.ascii_lowercase, min_size=3, max_size=5)),
    ),
    st.builds(
        ListNamespacesOp,
        st.lists(
            st.builds(
                MatchCondition, st.sampled_from(["prefix", "suffix"]),
                st.lists(st.sampled_from(["a", "b", "*"]), max_size=2).map(tuple),
            ),
            max_size=2,
        ).map(tuple),
        st.one_of(st.none(), st.integers(1, 2)), st.integers(1, 4), st.integers(0, 2),
    ),
)  # fmt: skip


class Model(InMemoryStore):
    """LangGraph's own, without what it keeps of values that were written over, and of empty namespaces."""

    def _handle_list_namespaces(self, op):
        for namespace in [namespace for namespace, held in self._data.items() if not held]:
            del self._data[namespace]
        return super()._handle_list_namespaces(op)

    def _insertinmem_store(self, to_embed, embeddings):  # theirs cannot have one text twice
        for places, embedding in zip(to_embed.values(), embeddings, strict=True):
            for namespace, key, path in places:
                self._vectors[namespace][key][path] = embedding

    def _extract_texts(self, put_ops):
        for namespace, key in put_ops:
            self._vectors[namespace].pop(key, None)
        return super()._extract_texts(put_ops)


def model() -> Model:
    embedder = Hashed()
    embed = lambda texts: embedder.encode(list(texts)).tolist()  # noqa: E731
    return Model(index={"dims": embedder.dim, "embed": embed, "fields": ["text"]})


def agree(op, ours, theirs) -> None:
    if isinstance(op, GetOp):
        assert (ours and (ours.namespace, ours.key, ours.value)) == (
            theirs and (theirs.namespace, theirs.key, theirs.value)
        )
    elif isinstance(op, SearchOp):
        assert len(ours) == len(theirs)
        scores = [
            [item.score for item in found if item.score is not None] for found in (ours, theirs)
        ]
        assert scores[0] == pytest.approx(scores[1], abs=1e-5)
        if len(ours) < op.limit:
            each = [
                sorted((i.namespace, i.key, repr(sorted(i.value.items(), key=repr)), i.score is None) for i in found)
                for found in (ours, theirs)
            ]  # fmt: skip
            assert each[0] == each[1]
    else:
        assert ours == theirs


@settings(CALM, max_examples=150)
@given(st.lists(st.lists(st.one_of(PUTS, PUTS, READS), min_size=1, max_size=6), max_size=8), READS)
def test_like_the_store_of_langgraph(batches, last):
    theirs = model()
    with AgentMemory(Hashed(), tau=0.5) as memory:
        ours = RSMStore(memory, fields=["text"])
        for ops in [*batches, [last]]:
            results = ours.batch(ops), theirs.batch(ops)
            assert len(results[0]) == len(ops)
            for op, mine, other in zip(ops, *results, strict=True):
                agree(op, mine, other)


def test_pages_hold_each_item_once(store):
    for n in range(30):
        store.put(("u", str(n % 3)), str(n), {"text": f"text {n}"}, index=None if n % 4 else False)
    for how in (
        {"query": "text 4"},
        {},
        {"filter": {"text": {"$ne": "text 4"}}, "query": "text 4"},
    ):
        pages = [store.search(("u",), limit=7, offset=at, **how) for at in range(0, 35, 7)]
        whole = store.search(("u",), limit=99, **how)
        assert [keys(page) for page in pages] == [
            keys(whole)[at : at + 7] for at in range(0, 35, 7)
        ]
        assert len(set(keys(whole))) == len(whole) == (29 if "filter" in how else 30)
        scores = [item.score for item in whole if item.score is not None]
        assert scores == sorted(scores, reverse=True)
        assert len(scores) == (22 if "query" in how else 0)


def test_a_filter_of_a_part_finds_what_stands_late(store):
    for n in range(5):
        store.put(("u",), str(n), {"a": {"n": n}})
    assert keys(store.search(("u",), filter={"a": {"n": 4}}, limit=1)) == ["4"]


def test_what_a_query_names_is_not_put_first(store, clock):
    clock.now = 1e9
    for n in range(30):
        clock.now += 3600 * 4
        store.put(("u",), str(n), {"text": f"text {n}"})
    scores = [item.score for item in store.search(("u",), query="What was yesterday?", limit=30)]
    assert scores == sorted(scores, reverse=True)
    for top in (1, 3):  # nor does it take the place of what is nearer
        found = store.search(("u",), query="What was yesterday?", limit=top)
        assert [item.score for item in found] == pytest.approx(scores[:top], abs=1e-6)


def test_the_largest_page(store):
    for n in range(9):
        store.put(("u",), str(n), {"n": n})
    for how in ({"query": "x"}, {"query": "x", "filter": {"n": [3]}}, {}):
        assert store.search(("u",), limit=2**24, offset=2**24, **how) == []
    assert len(store.search(("u",), query="x", limit=2**24)) == 9
    with pytest.raises(ValueError, match="limit: expected 0 to 16777216"):
        store.search(("u",), limit=2**24 + 1)


def test_comparisons(store):
    for n, value in enumerate([1, 2.5, 4, "3", None, True]):
        store.put(("u",), str(n), {"v": value})
    store.put(("u",), "missing", {"w": 1})

    def found(**condition):
        return keys(store.search(("u",), filter={"v": condition}))

    assert found(**{"$gt": 1}) == ["1", "2"]
    assert found(**{"$gte": 1, "$lt": 4}) == ["0", "1"]
    assert found(**{"$lte": 2.5}) == ["0", "1"]
    assert found(**{"$ne": 1}) == ["1", "2", "3", "4", "5", "missing"]
    nested = {"a": {"b": 3, "c": [1, {"d": 2}]}}
    store.put(("n",), "k", nested)
    for wanted, fits in (
        ({"a": {"b": 3}}, True), ({"a": {"b": {"$gt": 2}}}, True), ({"a": {"b": {"$gt": 3}}}, False),
        ({"a": {"c": [1, {"d": 2}]}}, True), ({"a": {"c": [1]}}, False), ({"a": {}}, True), ({"z": {}}, False),
    ):  # fmt: skip
        for query in (None, "k"):
            assert (store.search(("n",), filter=wanted, query=query) != []) == fits


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ({"a": {"$near": 1}}, "no operator"),
        ({"a": {"b": {"$in": [1]}}}, "no operator"),
        ({"a": {"$gt": None}}, r"filter\['a'\]: \$gt: expected a number"),
        ({1: 2}, "filter: expected str keys"),
        ([], "filter: expected a mapping"),
    ],
)
def test_filters_that_cannot_be(store, wanted, says):
    with pytest.raises((TypeError, ValueError), match=says):
        store.search((), filter=wanted)


# -- values -------------------------------------------------------------------------------------------


def test_values_come_back_whole(store):
    value = {
        "text": "  spaced  ",
        ".": {"": [1, None, 2.5, True, "é\x00"]},
        "..x": "",
        "key": {"stream": "s"},
    }
    store.put(("u",), " k ", value)
    (found,) = store.search(("u",))
    assert store.get(("u",), " k ").value == found.value == value
    assert store.get(("u",), "k") is None


def test_dates(store, clock):
    store.put(("u",), "k", {"text": "a"})
    clock.now += 50
    store.put(("u",), "k", {"text": "b"})
    item = store.get(("u",), "k")
    assert (item.created_at.timestamp(), item.updated_at.timestamp()) == (1000, 1050)
    assert item.updated_at.tzinfo is not None


def test_nothing_is_changed_before_it_is_there():
    ticks = itertools.count(1000.0)
    with AgentMemory(Hashed(), tau=0.5, clock=lambda: next(ticks)) as memory:
        RSMStore(memory).put(("u",), "k", {})
        item = RSMStore(memory).get(("u",), "k")
        assert item.created_at == item.updated_at


def test_what_is_embedded(memory):
    store = RSMStore(memory, fields=["a", "b[*].c"])
    store.put(("u",), "1", {"a": "one", "b": [{"c": "two"}, {"c": "three"}], "d": "four"})
    store.put(("u",), "2", {"d": "four"})
    store.put(("u",), "3", {"d": "four"}, index=["d"])
    texts = {item.key: item.text for item in memory.get_all('langgraph:["u"]')}
    assert texts == {'"1"': "one\ntwo\nthree", '"2"': "(not indexed)", '"3"': "four"}
    found = store.search(("u",), query="four")
    assert [item.key for item in found] == ["3", "1", "2"]
    assert [item.score is None for item in found] == [False, False, True]


def test_text_that_is_as_it_was_is_not_embedded(store, memory):
    store.put(("u",), "k", {"text": "a", "n": 1})
    calls = memory.embedder.calls
    store.put(("u",), "k", {"text": "a", "n": 2})
    assert memory.embedder.calls == calls
    assert store.get(("u",), "k").value == {"text": "a", "n": 2}


# -- times to live ------------------------------------------------------------------------------------


def test_items_expire_and_reading_refreshes(memory, clock):
    store = RSMStore(memory)
    store.put(("u",), "get", {"a": 1}, ttl=1)
    store.put(("u",), "search", {"a": 2}, ttl=1)
    store.put(("u",), "query", {"a": 3}, ttl=1)
    store.put(("u",), "unread", {"a": 4}, ttl=1)
    store.put(("u",), "kept", {"a": 5})
    for _ in range(3):
        clock.now += 40
        assert store.get(("u",), "get").value == {"a": 1}
        assert store.search(("u",), filter={"a": 2}) != []
        assert store.search(("u",), query="x", filter={"a": 3}) != []
        assert store.search(("u",), filter={"a": 4}, refresh_ttl=False) is not None
    assert sorted(keys(store.search(("u",), refresh_ttl=False))) == [
        "get",
        "kept",
        "query",
        "search",
    ]
    assert store.get(("u",), "unread") is None
    assert store.get(("u",), "get").updated_at.timestamp() == 1000  # reading is no change
    assert store.sweep_ttl() == 1
    clock.now += 61
    assert keys(store.search(("u",))) == ["kept"]
    assert store.list_namespaces() == [("u",)]


def test_ttl_of_the_store_and_of_no_one(clock):
    with AgentMemory(Hashed(), tau=0.5, clock=clock, ttl=5) as memory:
        store = RSMStore(memory, ttl={"default_ttl": 1, "refresh_on_read": False})
        store.put(("u",), "default", {})
        store.put(("u",), "never", {}, ttl=None)
        clock.now += 59
        assert store.get(("u",), "default") is not None
        clock.now += 2
        assert keys(store.search(("u",))) == ["never"]
        store.put(("u",), "never", {"n": 1}, ttl=1)
        store.put(("u",), "never", {"n": 2}, ttl=None)
        clock.now += 1e6
        assert keys(store.search(("u",))) == ["never"]
    with pytest.raises(ValueError, match="sweep_interval_minutes"):
        RSMStore(memory, ttl={"sweep_interval_minutes": 1})


# -- batches ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        PutOp(("u",), "k", {"a": {1, 2}}),
        PutOp(("u",), "k", {"a": float("nan")}),
        PutOp(("u",), "k", {1: 2}),
        PutOp(("u",), 3, {}),
        PutOp(("u",), "k", {}, None, 0),
        PutOp(("u",), "k", {}, None, float("inf")),
        PutOp(("u",), "k", {}, None, "1"),
        PutOp(("u",), "k", {}, "text"),
        PutOp(("u",), "k", {}, [1]),
        SearchOp(("u",), limit=-1),
        SearchOp(("u",), offset=True),
        SearchOp(("u",), {"a": {"$x": 1}}),
        ListNamespacesOp((MatchCondition("infix", ("a",)),)),
        "put",
    ],
    ids=lambda op: repr(op)[:60],
)
def test_a_bad_op_leaves_all_as_it_was(store, bad):
    store.put(("u",), "old", {"text": "a"}, ttl=5)
    with pytest.raises((TypeError, ValueError)):
        store.batch([PutOp(("u",), "new", {}), PutOp(("u",), "old", None), bad])
    assert keys(store.search(("u",))) == ["old"]


def test_a_failing_write_leaves_its_namespace_as_it_was(store, memory, monkeypatch):
    store.put(("u",), "old", {"text": "a"})
    break_commits(monkeypatch, memory)
    with pytest.raises(OSError, match="full"):
        store.batch([PutOp(("u",), "old", {"text": "b"}), PutOp(("u",), "new", {"text": "c"})])
    monkeypatch.undo()
    assert [(item.key, item.value) for item in store.search(("u",))] == [("old", {"text": "a"})]


def test_a_refresh_does_not_meet_another_value(store, memory, clock, monkeypatch):
    store.put(("u",), "k", {"n": 1}, ttl=1)
    update, threads = memory.update, []

    def late(*args, **how):
        threads.append(threading.Thread(target=RSMStore(memory).put, args=(("u",), "k", {"n": 2})))
        threads[0].start()
        threads[0].join(0.2)  # it waits for the refresh to end
        update(*args, **how)

    monkeypatch.setattr(memory, "update", late)
    assert store.get(("u",), "k").value == {"n": 1}
    threads[0].join()
    clock.now += 100
    assert store.get(("u",), "k").value == {"n": 2}  # which was put for ever


def test_reading_a_file_that_may_not_be_written(store, memory, monkeypatch):
    def refuse(*args, **how):
        raise PermissionError

    store.put(("u",), "k", {"n": 1}, ttl=1)
    monkeypatch.setattr(memory, "update", refuse)
    assert store.get(("u",), "k").value == {"n": 1}
    assert keys(store.search(("u",))) == ["k"]


def test_one_transaction_for_what_goes_together(store, memory):
    store.batch([PutOp(("u",), str(n), {"text": f"t{n}"}) for n in range(50)])
    assert memory.embedder.calls <= 3
    store.delete(("u",), "not there")


def test_the_values_of_a_batch_are_written_together_or_not_at_all(store, memory, monkeypatch):
    store.put(("u",), "old", {"text": "old"})
    puts = [
        PutOp((name,), f"{n}", {"text": f"{name} {n}"}, ttl=5 if n == 2 else None)
        for name in "uvw"
        for n in range(3)
    ]
    with monkeypatch.context() as broken:
        break_commits(broken, memory)
        with pytest.raises(OSError, match="full"):
            store.batch([*puts, PutOp(("u",), "old", None)])
    assert store.list_namespaces() == [("u",)]
    assert keys(store.search(("u",))) == ["old"]
    store.batch([*puts, PutOp(("u",), "old", None)])
    for name in "uvw":
        assert sorted(keys(store.search((name,)))) == ["0", "1", "2"]


def test_async(memory):
    async def work():
        store = RSMStore(memory)
        await asyncio.gather(
            *(store.aput((user,), str(n), {"n": n}) for user in "ab" for n in range(20))
        )
        found = await asyncio.gather(
            *(store.asearch((user,), query="n", limit=50) for user in "ab")
        )
        assert [sorted(keys(some), key=int) for some in found] == [[str(n) for n in range(20)]] * 2
        await store.adelete(("a",), "3")
        assert await store.aget(("a",), "3") is None
        assert (await store.aget(("b",), "3")).value == {"n": 3}
        assert await store.alist_namespaces() == [("a",), ("b",)]
        return await store.abatch(
            [GetOp(("a",), "1"), SearchOp(("b",), limit=1), GetOp(("a",), "9")]
        )

    first, second, third = asyncio.run(work())
    assert (first.key, len(second), third.key) == ("1", 1, "9")


def test_a_file_reopens(tmp_path):
    with AgentMemory(Hashed(), tau=0.5, path=tmp_path / "m.db") as memory:
        RSMStore(memory, fields=["text"]).put(("u", "v"), "k", {"text": "a"}, ttl=60)
    with AgentMemory(Hashed(), tau=0.5, path=tmp_path / "m.db") as memory:
        (item,) = RSMStore(memory).search(("u",), query="a")
        assert (item.namespace, item.key, item.value) == (("u", "v"), "k", {"text": "a"})
        assert item.score == pytest.approx(1, abs=1e-3)


def test_in_a_graph(store):
    graph_module = pytest.importorskip("langgraph.graph")

    def node(state: dict, *, store) -> dict:
        store.put(("users", "ada"), "city", {"text": "Ada lives in Lyon."})
        return {"said": store.search(("users", "ada"), query="Ada lives in Lyon.")[0].value["text"]}

    from langgraph.store.base import BaseStore

    node.__annotations__["store"] = BaseStore
    graph = graph_module.StateGraph(dict)
    graph.add_node("node", node)
    graph.add_edge(graph_module.START, "node")
    assert graph.compile(store=store).invoke({})["said"] == "Ada lives in Lyon."


def test_arguments():
    with pytest.raises(TypeError, match="memory: expected an AgentMemory"):
        RSMStore("memory.db")
    with AgentMemory(Hashed(), tau=0.5) as memory, pytest.raises(TypeError, match="fields"):
        RSMStore(memory, fields="text")


# -- many streams as one ----------------------------------------------------------------------------------


def test_nearest_looks_into_all_atoms():
    with AgentMemory(Hashed(), tau=0.3) as memory:
        memory.add([f"text {n}" for n in range(300)], "a")
        assert 5 < memory.counts()["a"].atoms < 30
        for query in map(str, range(10)):
            whole = memory.search(query, "a", top_k=300, top_atoms=300, addressing=False)
            found = nearest(memory, query, ["a"], 2)
            assert [hit.id for hit in found] == [hit.id for hit in whole[:2]]


@CALM
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.text(string.ascii_lowercase, min_size=1, max_size=3)),
        max_size=40,
    ),
    st.integers(0, 12),
    st.integers(1, 4),
)
def test_nearest_of_many_streams(added, most, each):
    with AgentMemory(Hashed(), tau=0.5) as memory:
        for stream, text in added:
            memory.add(text, stream)
        keep = lambda hit: int(hit.id) % each == 0  # noqa: E731
        found = nearest(memory, "query", ["a", "b"], most, keep=keep)
        every = [
            hit
            for stream in "ab"
            for hit in memory.search("query", stream, top_k=99, top_atoms=99, addressing=False)
        ]
        want = sorted((-hit.score, int(hit.id)) for hit in every if keep(hit))[:most]
        assert [int(hit.id) for hit in found] == [id for _, id in want]
