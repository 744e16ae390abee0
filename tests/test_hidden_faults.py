"""Capturing where neighbours fail: offloaded models, tuples, norms, exceptions, overflows."""

from __future__ import annotations

import threading

import pytest
import torch
from hidden_support import LAYERS, WIDTH, Toy, batch_of, hooks, llama, states

from rsm_torch.hidden import capture

ROWS = [[5, 6, 7, 8, 9], [11, 12], [21, 22, 23, 24]]


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_an_offloaded_model_gives_no_zeros(tmp_path, where):
    from accelerate import dispatch_model

    model, batch = llama(), batch_of(ROWS, "left")
    expected = states(model, batch, range(LAYERS + 1), "mean")
    device_map = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    device_map |= {f"model.layers.{i}": where if i % 2 else "cpu" for i in range(LAYERS)}
    device_map["model.norm"] = where
    spread = dispatch_model(
        llama(), device_map, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True
    )
    assert (spread.model.layers[1].mlp.up_proj.weight.device.type == "meta") == (where == "disk")
    places = {name: p.device for name, p in spread.named_parameters()}
    for stop in (False, True):
        with torch.no_grad(), capture(spread, range(LAYERS + 1), "mean", stop=stop) as acts:
            acts.run(**batch)
        for layer in acts:
            torch.testing.assert_close(acts[layer], expected[layer])
            assert acts[layer].abs().sum(1).min() > 0
    assert {name: p.device for name, p in spread.named_parameters()} == places


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU beside the CPU")
def test_a_model_on_two_devices_keeps_states_where_they_are():
    from accelerate import dispatch_model

    model, batch = llama(), batch_of(ROWS, "left")
    expected = states(model, batch, range(LAYERS + 1), "mean")
    device_map = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    device_map |= {"model.norm": "cpu"} | {
        f"model.layers.{i}": 0 if i % 2 else "cpu" for i in range(LAYERS)
    }
    acts = states(
        dispatch_model(llama(), device_map, main_device="cpu"), batch, range(LAYERS + 1), "mean"
    )
    assert [acts[layer].device.type for layer in acts] == ["cpu", "cuda", "cpu", "cuda", "cpu"]
    for layer in acts:
        torch.testing.assert_close(acts[layer].cpu(), expected[layer], rtol=1e-3, atol=1e-4)


def test_masks_follow_a_layer_to_its_device():
    # "meta" stands in for a second device: it holds no values, but refuses other devices' tensors.
    model, batch = Toy(), batch_of(ROWS)
    model.blocks[2:].to("meta")
    model.last.to("meta")
    model.blocks[2].register_forward_pre_hook(lambda m, args: (args[0].to("meta"),))
    mask = torch.ones(3, 5)
    acts = states(
        model,
        {"ids": batch["input_ids"], "attention_mask": batch["attention_mask"]},
        [1, 2],
        "mean",
        check=False,
        mask=mask,
    )
    assert (acts[1].device.type, acts[2].device.type) == ("cpu", "meta")
    assert bool((acts[1] != 0).all())


@pytest.mark.parametrize("pool", ["last", "mean", "first"])
def test_layers_that_return_tuples_and_tensors_give_the_same(pool):
    tensors, tuples = Toy(tuples=False), Toy(tuples=True)
    tuples.load_state_dict(tensors.state_dict())
    batch = batch_of(ROWS)
    given = {"ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    one, other = states(tensors, given, [0, 2], pool), states(tuples, given, [0, 2], pool)
    for layer in (0, 2):
        assert one[layer].shape == (3, WIDTH)
        assert torch.equal(one[layer], other[layer])


def test_before_and_after_the_final_norm_are_told_apart():
    model, batch = llama(), batch_of(ROWS)
    pre = states(model, batch, -1)
    post = states(model, batch, -1, norm="post")
    assert pre.norms == {LAYERS - 1: "pre"}
    assert post.norms == {LAYERS: "post"}
    assert not torch.allclose(pre[-1], post[-1], atol=1e-2)
    torch.testing.assert_close(model.model.norm(pre[-1]), post[-1])
    assert torch.equal(post[-1], states(model, batch, "final")["final"])
    with pytest.raises(ValueError, match=r"norm: 'post' .* layer 1 does not have"):
        capture(model, [1, -1], norm="post")


@pytest.mark.parametrize("stop", [False, True])
def test_a_failure_leaves_no_hook_and_nothing_of_its_forward(stop):
    model, batch = llama(), batch_of(ROWS)
    before, forward = hooks(model), model.forward
    fail = [False]

    def failing(module, args, output):
        if fail[0]:
            raise MemoryError("no room")

    handle = model.model.layers[1].register_forward_hook(failing)
    captured = capture(model, [0, 2], stop=stop)
    with captured as acts:
        assert hooks(model) > before + 1
        acts.run(**batch)
    fail[0] = True
    with pytest.raises(MemoryError, match="no room"), captured as acts:
        acts.run(**batch)
    handle.remove()
    assert hooks(model) == before
    assert model.forward == forward
    assert "forward" not in vars(model)
    assert [len(acts.steps(layer)) for layer in (0, 2)] == [1, 1]
    fail[0] = False
    with captured as acts:
        acts.run(**batch)
    assert acts.runs == 2
    assert torch.equal(acts.steps(0)[0], acts.steps(0)[1])


def test_an_exception_in_the_block_itself_leaves_no_hook():
    model = llama()
    before = hooks(model)
    for error in (KeyboardInterrupt, ValueError):
        with pytest.raises(error), capture(model, lambda name: True, "none"):
            raise error
    with pytest.raises(ValueError, match="input_ids"), capture(model, [1], "none"):
        model(nonsense=1)
    assert hooks(model) == before


def test_a_failed_forward_caught_in_the_block_does_not_shift_the_next():
    model, batch = llama(), batch_of(ROWS)
    fails = [True, False]

    def sometimes(module, args, output):
        if fails.pop(0):
            raise MemoryError

    model.model.layers[1].register_forward_hook(sometimes)
    with torch.no_grad(), capture(model, [0, 2], "mean") as acts:
        with pytest.raises(MemoryError):
            model(**batch_of(ROWS[:1]))
        with pytest.raises(RuntimeError, match="layers 2 did not run"):
            acts[0]
        model(**batch)
    assert acts[0].shape == acts[2].shape == (3, WIDTH)


@pytest.mark.parametrize("stop", [False, True])
def test_a_block_sees_nothing_of_another_thread(stop):
    model, alone = llama(), batch_of([[1, 9, 4]])
    expected, results = states(model, alone, 2, "mean")[2], []

    def elsewhere():
        results.append(model(**batch_of(ROWS)).logits.shape)

    with torch.no_grad(), capture(model, 2, "mean", stop=stop) as acts:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        acts.run(**alone)
    assert torch.equal(acts[2], expected)
    assert [shape[0] for shape in results] == [len(ROWS)]  # its forward went on to the end


def test_a_block_is_run_by_the_thread_that_entered_it():
    model, errors = llama(), []

    def elsewhere(acts):
        try:
            acts.run(**batch_of(ROWS))
        except RuntimeError as error:
            errors.append(str(error))

    with capture(model, 2) as acts:
        thread = threading.Thread(target=elsewhere, args=(acts,))
        thread.start()
        thread.join()
    assert errors == ["run: another thread entered this block; enter one here"]
    with pytest.raises(RuntimeError, match="sees what its own thread runs"):
        acts[2]


@pytest.mark.parametrize(("value", "kind"), [(torch.inf, "inf"), (torch.nan, "NaN")])
@pytest.mark.parametrize("pool", ["last", "mean", "none"])
def test_states_that_are_not_finite_name_layer_and_rows(value, kind, pool):
    model, batch = Toy().half(), batch_of(ROWS)
    given = {"ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}

    def spoil(module, args, output):
        output = output.clone()
        output[0, 4], output[2, 3] = value, value  # the last tokens of rows 0 and 2
        output[1, 4] = value  # padding
        return output

    model.blocks[2].register_forward_hook(spoil)
    before = hooks(model)
    with capture(model, [0, 2], pool) as acts:
        message = rf"layer 2: states not finite in rows 0 \({kind}\), 2 \({kind}\);.*float16"
        with pytest.raises(ValueError, match=message):
            model(**given)
    assert acts.runs == 0
    assert hooks(model) == before
    unchecked = states(model, given, [0, 2], pool, check=False)
    assert not unchecked[2].isfinite().all()


def test_rows_in_which_nothing_counts_are_named():
    model, batch = llama(), batch_of(ROWS)
    with pytest.raises(ValueError, match="layer 1: no token counts in rows 1; see attention_mask"):
        states(model, batch, 1, span=(2, 4))
    unchecked = states(model, batch, 1, span=(2, 4), check=False)[1]
    assert unchecked.isnan().all(1).tolist() == [False, True, False]
