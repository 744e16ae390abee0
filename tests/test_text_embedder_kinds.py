"""What users have at hand as an embedder: models with prompts, objects, functions, servers."""

from __future__ import annotations

import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from text_support import Hashed, needs_minilm

from rsm_torch.embedders import (
    BATCH_TEXTS,
    MINILM,
    Endpoint,
    default_embedder,
    embed,
    embed_queries,
    embed_query,
    fingerprint,
    load_embedder,
    needs_name,
    packaged_weights,
    same_space,
    window,
)
from rsm_torch.text.chunking import split_to_window
from rsm_torch.tokens import token_counter


def lengths(texts: list[str]) -> list[list[float]]:
    return [[len(text), text.count("e") + 1, 2.0, 3.0] for text in texts]


# Models of sentence-transformers


@pytest.fixture(scope="module")
def minilm():
    return load_embedder(MINILM, device="cpu")


def with_prompts(folder, **settings):
    """A copy of MiniLM whose folder names prompts."""
    weights = packaged_weights(MINILM)
    shutil.copytree(weights, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "model.safetensors").symlink_to(weights / "model.safetensors")
    file = folder / "config_sentence_transformers.json"
    known = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**known, **settings}))
    return load_embedder(folder, device="cpu")


@needs_minilm
@pytest.mark.parametrize("default", [None, "document", "query"])
def test_queries_and_documents_get_the_models_own_prompts(tmp_path, minilm, default):
    prompts = {"query": "query: ", "document": "passage: "}
    own = with_prompts(tmp_path / "model", prompts=prompts, default_prompt_name=default)
    expected = embed(minilm, ["query: trains", "passage: trains"])
    torch.testing.assert_close(embed_query(own, "trains"), expected[0])
    torch.testing.assert_close(embed(own, ["trains"])[0], expected[1])
    assert window(own) == 254 - 2  # "passage", ":"


@needs_minilm
def test_a_loaded_model_is_the_same_embedder_as_its_id_and_its_folder(tmp_path, minilm):
    from sentence_transformers import SentenceTransformer

    loaded = SentenceTransformer(str(packaged_weights(MINILM)), device="cpu")
    own = load_embedder(loaded)
    assert (own.name, own.dim, own.max_tokens) == (MINILM, 384, 256)
    assert load_embedder(loaded, name="mine").name == "mine"
    folder = with_prompts(tmp_path / "copy")
    assert folder.name == "copy"
    marks = [fingerprint(one) for one in (minilm, own, folder)]
    assert same_space(marks[0], marks[1])
    assert same_space(marks[0], marks[2])
    method = load_embedder(loaded.encode)
    assert needs_name(method)
    assert same_space(marks[0], fingerprint(method))


@needs_minilm
def test_rounding_to_another_dtype_leaves_a_space_and_another_prompt_does_not(tmp_path, minilm):
    mark = fingerprint(minilm)
    for dtype in (torch.float16, torch.bfloat16):
        assert same_space(mark, mark.to(dtype))
    prompted = with_prompts(tmp_path / "model", prompts={"document": "passage: "})
    assert not same_space(mark, fingerprint(prompted))
    assert not same_space(mark, mark[:, :128])


@needs_minilm
def test_fewer_values(minilm):
    short = load_embedder(MINILM, device="cpu", dim=64)
    assert short.dim == 64
    torch.testing.assert_close(embed(short, ["a cat"]), embed(minilm, ["a cat"])[:, :64])
    assert load_embedder(lengths, dim=2).dim == 2
    renamed = load_embedder(Hashed(), name="other", dim=8)
    assert (renamed.name, renamed.dim) == ("other", 8)
    with pytest.raises(ValueError, match=r"dim: embedder 'lengths' has 4 values.*got 5"):
        load_embedder(lengths, dim=5)
    with pytest.raises(TypeError, match="dim: expected an int"):
        load_embedder(lengths, dim=2.5)


def test_one_default(monkeypatch):
    from rsm_torch import embedders
    from rsm_torch.cli import embedding

    asked = []
    monkeypatch.setattr(embedders, "load_embedder", asked.append)
    embedding.open_embedder(None)
    assert asked == [default_embedder()]
    monkeypatch.setattr(embedders, "PACKAGED", {})
    assert default_embedder() == embedders.DEFAULT_EMBEDDER


# Windows


@needs_minilm
@pytest.mark.parametrize("ending", ["", "\n\n", "  "])
def test_parts_fit_the_window_and_are_the_text(minilm, ending):
    text = "  One sentence of some words. Another one!\n\n\tIndented 🙂 line\n" * 60 + ending
    parts = split_to_window(text, minilm)
    assert "".join(parts) == text
    count = token_counter(minilm.tokenizer)
    assert window(minilm) == 254
    assert all(count(part) <= 254 for part in parts)
    assert len(parts) <= 2 * count(text) / 254
    assert all(part.endswith(("\n", " ", ".", "!")) for part in parts)


@needs_minilm
@pytest.mark.parametrize(
    "text",
    ["", "short", "\ud800 lone " * 300, "deadbeef" * 400, "🙂" * 300, "日本語" * 400, " " * 9000],
)
def test_no_character_is_lost(minilm, text):
    assert "".join(split_to_window(text, minilm)) == text


def test_a_text_stays_whole_where_no_window_is_known():
    function = load_embedder(lengths, name="mine")
    assert window(function) is None
    assert split_to_window("a b " * 5000, function) == ["a b " * 5000]


# Objects and functions


class LangChain:
    model = "chain-model"

    def embed_documents(self, texts):
        return [[1.0, len(text), 0.0] for text in texts]

    def embed_query(self, text):
        return [0.0, len(text), 1.0]


def test_an_object_with_two_methods():
    own = load_embedder(LangChain())
    assert (own.name, own.dim, needs_name(own)) == ("chain-model", 3, False)
    assert embed(own, ["abc"]).tolist() == [[1, 3, 0]]
    assert embed_query(own, "abc").tolist() == [0, 3, 1]
    assert embed_queries(own, ["a", "ab"]).tolist() == [[0, 1, 1], [0, 2, 1]]


def test_an_embedder_of_ones_own_with_a_way_for_queries():
    class Two(Hashed):
        def encode_query(self, texts):
            return self.encode([f"query: {text}" for text in texts])

    own = load_embedder(Two())
    assert torch.equal(embed_query(own, "a"), embed(Hashed(), ["query: a"])[0])
    plain = load_embedder(Hashed())
    assert torch.equal(embed_query(plain, "a"), embed(plain, ["a"])[0])


def test_an_object_with_encode_alone():
    class Static:
        def encode(self, texts):
            return np.ones((len(texts), 3))

    assert load_embedder(Static()).name.endswith("Static")


def test_two_functions_of_one_name_are_two_spaces():
    a = load_embedder(lambda texts: [[len(t), 1.0, 0.0] for t in texts])
    b = load_embedder(lambda texts: [[1.0, len(t), t.count(" ")] for t in texts])
    assert needs_name(a)
    assert not needs_name(load_embedder(a.function, name="mine"))
    assert a.name == b.name
    assert not same_space(fingerprint(a), fingerprint(b))
    assert same_space(fingerprint(a), fingerprint(load_embedder(a.function)))
    assert not needs_name(load_embedder(Hashed()))


def test_functions_without_a_spread_are_compared_all_the_same():
    ones = load_embedder(lambda texts: torch.ones(len(texts), 3))
    other = load_embedder(lambda texts: torch.tensor([[1.0, 2.0, 3.0]] * len(texts)))
    assert same_space(fingerprint(ones), fingerprint(ones))
    assert not same_space(fingerprint(ones), fingerprint(other))


async def later(texts):
    return lengths(texts)


async def one_by_one(texts):
    yield [1.0]


class Late(Hashed):
    async def encode(self, texts):
        return [[1.0] * 16 for _ in texts]


@pytest.mark.parametrize("function", [later, one_by_one])
def test_async_functions_are_refused_by_name(function):
    with pytest.raises(TypeError, match=f"{function.__name__}' is async"):
        load_embedder(function)


def test_async_embedders_are_refused_by_name():
    with pytest.raises(TypeError, match="'test/hashed' is async"):
        embed(load_embedder(Late()), ["a"])


@pytest.mark.parametrize(
    "wrong",
    [
        lambda texts: None,
        lambda texts: "text",
        lambda texts: {"data": []},
        lambda texts: [[1.0], [2.0, 3.0]],
        lambda texts: [["a"]],
        lambda texts: iter([]),
    ],
)
def test_wrong_returns_are_refused(wrong):
    with pytest.raises((TypeError, ValueError), match=r"must return an array \[1, D\]"):
        load_embedder(wrong)


def test_lists_of_vectors_are_arrays():
    for kind in (torch.tensor, np.array):
        own = load_embedder(lambda texts, kind=kind: [kind([1.0, 2.0]) for _ in texts])
        assert embed(own, ["a", "b"]).tolist() == [[1, 2], [1, 2]]


def test_a_module_that_is_no_embedder_is_refused():
    with pytest.raises(TypeError, match=r"embedder: expected a model id.*got Linear"):
        load_embedder(torch.nn.Linear(2, 2))


# Servers


class Server(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, self.headers.get("Authorization"), asked))
        status, headers, body = (self.server.replies or [(200, {}, None)]).pop(0)
        if body is None:
            rows = [
                {"index": place, "embedding": [float(len(text)), 1.0]}
                for place, text in enumerate(asked["input"])
            ]
            body = {"data": rows[::-1]}
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": len(sent)}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(sent)


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as running:
        running.seen, running.replies = [], []
        running.daemon_threads = True
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        running.url = f"http://127.0.0.1:{running.server_port}/v1"
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def waits(monkeypatch):
    from rsm_torch import embedders

    waited: list[float] = []
    monkeypatch.setattr(embedders.time, "sleep", waited.append)
    return waited


def test_a_server_is_asked_in_batches_and_answers_in_any_order(server):
    own = load_embedder(f"openai:@cf/mini@{server.url}")
    assert (own.name, own.dim, needs_name(own)) == ("openai:@cf/mini", 2, False)
    texts = ["a" * (1 + n % 7) for n in range(BATCH_TEXTS + 3)]
    assert embed(own, texts)[:, 0].tolist() == [len(text) for text in texts]
    path, key, asked = server.seen[-1]
    assert (path, key) == ("/v1/embeddings", "Bearer sk-secret")
    assert (asked["model"], len(asked["input"])) == ("@cf/mini", 3)


def test_long_texts_make_batches_of_their_own(server):
    Endpoint("m", server.url)(["a" * 150_000, "b" * 150_000, "c"])
    assert [len(asked["input"]) for _, _, asked in server.seen] == [1, 2]


def test_passing_failures_are_tried_again(server, waits):
    server.replies += [
        (429, {"Retry-After": "7"}, {}),
        (503, {}, {}),
        (500, {}, {}),
        (200, {}, None),
    ]
    assert Endpoint("m", server.url)(["abc"]) == [[3.0, 1.0]]
    assert waits == [7.0, 1.0, 2.0]


def test_a_server_that_stays_down_is_given_up(server, waits):
    server.replies += [(503, {}, {"error": "full"})] * 9
    with pytest.raises(OSError, match=r"openai:m at http://127.*status 503.*full"):
        Endpoint("m", server.url, retries=2)(["abc"])
    assert (len(server.seen), len(waits)) == (3, 2)


@pytest.mark.parametrize("status", [400, 401, 404, 307])
def test_other_refusals_are_final_and_tell_no_key(server, waits, status):
    headers = {"Location": server.url + "/other"} if status == 307 else {}
    server.replies += [(status, headers, {"error": {"message": "too long"}})]
    with pytest.raises(OSError, match=rf"status {status}.*too long") as caught:
        Endpoint("m", server.url)(["abc"])
    assert "secret" not in str(caught.value)
    assert (len(server.seen), waits) == (1, [])


@pytest.mark.parametrize("body", [b"<html>", {"data": []}, {"data": [{"index": 5}]}, [1], {}])
def test_replies_without_embeddings_are_told(server, waits, body):
    server.replies += [(200, {}, body)]
    with pytest.raises(OSError, match="gave no embeddings for 1 texts"):
        Endpoint("m", server.url)(["abc"])


def test_no_server_there(waits, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "*")
    with pytest.raises(OSError, match=r"openai:m at http://127\.0\.0\.1:9/v1"):
        Endpoint("m", "http://127.0.0.1:9/v1", retries=1)(["abc"])
    assert waits == [0.5]


def test_a_slow_server_times_out(server, waits):
    gate = threading.Event()
    server.replies += [(200, {}, None)]
    slow = Endpoint("m", server.url, retries=0, timeout=0.2)
    original = Server.do_POST
    try:
        Server.do_POST = lambda self: gate.wait(5)
        with pytest.raises(OSError, match="timed out"):
            slow(["abc"])
    finally:
        Server.do_POST = original
        gate.set()


def test_no_key_and_wrong_addresses(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(ValueError, match="OPENAI_API_KEY is not set"):
        load_embedder("openai:text-embedding-3-small")
    with pytest.raises(ValueError, match="expected a model after 'openai:'"):
        load_embedder("openai:")
    with pytest.raises(ValueError, match=r"without user and password, got 'host/v1'"):
        load_embedder("openai:m@https://me:pass@host/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "sk\nx")
    with pytest.raises(ValueError, match="OPENAI_API_KEY holds what no key has") as caught:
        Endpoint("m")
    assert "sk" not in str(caught.value)
