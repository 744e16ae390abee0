"""Limited atoms in hidden-state memories: exact after every call, right labels, whole or not at all."""

from __future__ import annotations

import random
from string import ascii_lowercase

import pytest
import torch
from hidden_memory_support import EXAMPLES, TEXTS, Letters, config, memory, pooled, same, whole
from hidden_support import WIDTH, llama
from memory_support import state
from torch.nn.functional import normalize

from rsm_torch import StreamMemory
from rsm_torch.hidden import HiddenStateMemory
from rsm_torch.hidden.store import BLOCK, write_in_blocks

PLACES = ["north", "south", "east", "west"]
WORDS = [f"{a}{b} {place}" for a in "abcdefgh" for b in "klmnop" for place in PLACES]  # 192


def clusters(n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [n, WIDTH] around six centres far from each other, and which."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.eye(WIDTH)[:6] * 4
    of = torch.randint(6, (n,), generator=generator)
    return centres[of] + 0.2 * torch.randn(n, WIDTH, generator=generator), of


def limited(atoms: int | None = 6, **more) -> StreamMemory:
    return StreamMemory(config(tau=0.999, max_atoms=atoms, policy="ward", **more), 3)


def test_a_stream_never_holds_more_atoms_than_the_default():
    drawn = random.Random(0)
    texts = ["".join(drawn.choices(ascii_lowercase, k=6)) for _ in range(200)]
    kept = memory(model=llama(width=256), config=None, streams=2)  # signs need numbers
    kept.calibrate(EXAMPLES)
    for start in range(0, 200, 50):
        some = texts[start : start + 50]
        kept.write(some, streams=start // 50 % 2, labels=some)
        assert int(kept.counts().atoms.max()) <= 32
    assert kept.counts().members.tolist() == [100, 100]
    assert int(kept.memory.events()["merged"].min()) > 0
    held = kept.memory.members(1)
    names = kept.ready.labels.decode(held.labels.tolist())
    assert held.ids.tolist() == [*range(50, 100), *range(150, 200)]
    assert names == texts[50:100] + texts[150:]


@pytest.mark.parametrize("most", [1, 5, None])
def test_max_atoms_is_what_it_is_told(most):
    kept = memory(model=llama(width=256), config=None, max_atoms=most, streams=1)
    kept.calibrate(EXAMPLES)
    for text in WORDS[:40]:  # one at a time, too
        kept.write(text, labels=[text])
        assert int(kept.counts().atoms) <= (most or 40)
    assert int(kept.counts().atoms) == (most or int(kept.counts().atoms))
    assert int(kept.counts().members) == 40
    if most is None:
        assert int(kept.counts().atoms) > 5


def test_the_config_has_its_own_limit():
    assert memory(config=config()).memory.config.max_atoms is None
    both = memory(config=config(max_atoms=3, policy="ward"), max_atoms=3)
    assert both.memory.config.max_atoms == 3
    with pytest.raises(ValueError, match="max_atoms: got 4, and a config with max_atoms=None; set"):
        memory(config=config(), max_atoms=4)
    with pytest.raises(ValueError, match="max_atoms: expected an int of at least 1, got 0"):
        memory(config=None, max_atoms=0).calibrate(EXAMPLES)


def test_labels_are_right_when_atoms_must_merge():
    kept = HiddenStateMemory(llama(), Letters(), layer=2, config=limited().config, streams=1)
    rows, of = clusters(200)
    kept.write_states(rows[None], labels=[of.tolist()], layer=2, norm="pre")
    assert int(kept.counts().atoms) == 6
    queries, wanted = clusters(50, seed=1)
    found = kept.recall_states(queries, 0, layer=2, norm="pre", top_k=3)
    assert found.labels == [[int(one)] * 3 for one in wanted]
    owner = kept.memory.members(0).atoms
    assert len(set(zip(owner.tolist(), of.tolist(), strict=True))) == 6  # atoms are the clusters


def test_a_long_write_is_as_its_blocks_are():
    rows, of = clusters(2 * BLOCK + 20)
    whole_call, by_hand = limited(), limited()
    written = write_in_blocks(whole_call, rows[None], [1], labels=of[None])
    for start in range(0, len(rows), BLOCK):
        part = slice(start, start + BLOCK)
        by_hand.write(rows[None, part], [1], labels=of[None, part])
    assert same(state(whole_call), state(by_hand))
    held = whole_call.members(1)
    assert torch.equal(written.ids[0], held.ids)
    assert torch.equal(written.atoms[0], held.atoms)
    assert bool(written.opened.any())
    assert len(written.compacted.merged) == int(whole_call.events()["merged"][1])


def test_rows_of_unlike_lengths_keep_their_ids():
    rows = clusters(3 * 200)[0].view(3, 200, WIDTH)
    lengths = [200, 0, BLOCK + 1]
    one, two = limited(), limited(None)
    written = write_in_blocks(one, rows, [2, 0, 1], lengths, times=torch.arange(600.0).view(3, 200))
    plain = two.write(rows, [2, 0, 1], lengths)
    assert torch.equal(written.ids, plain.ids)
    assert one.counts().members.tolist() == [0, BLOCK + 1, 200]
    assert one.counts().atoms.tolist() == [0, 6, 6]
    for row, slot in ((0, 2), (2, 1)):
        held, n = one.members(slot), lengths[row]
        assert torch.equal(written.atoms[row, :n], held.atoms)
        assert held.times.tolist() == [200.0 * row + t for t in range(n)]
        torch.testing.assert_close(held.vectors, normalize(rows[row, :n], dim=-1))
    assert (written.atoms[1] == -1).all()


def test_items_that_limits_drop_have_no_atom():
    kept = limited(max_members=70)
    written = write_in_blocks(kept, clusters(200)[0][None], [0])
    assert (written.atoms[0, :130] == -1).all()
    assert torch.equal(written.atoms[0, 130:], kept.members(0).atoms)
    assert sorted(written.compacted.removed) == list(range(130))


@pytest.mark.parametrize("fault", ["ids", "times", "zero"])
def test_a_fault_far_into_a_long_write_changes_nothing(fault):
    kept = HiddenStateMemory(llama(), Letters(), layer=2, config=limited().config, streams=1)
    kept.write(TEXTS, labels=["a"] * 5)
    before = whole(kept)
    rows = clusters(200)[0][None]
    given = {"ids": torch.arange(1000, 1200)[None], "times": torch.zeros(1, 200)}
    if fault == "ids":
        given["ids"][0, 190] = 1003
    elif fault == "times":
        given["times"][0, 190] = torch.inf
    else:
        rows[0, 190] = 0
    with pytest.raises(ValueError, match=r"190|1003|infinite"):
        kept.write_states(rows, labels=[["b"] * 200], layer=2, norm="pre", **given)
    assert same(before, whole(kept))
    assert kept.recall(TEXTS[0], top_k=1).labels == [["a"]]


def test_texts_in_a_long_list_find_themselves():
    model = llama()
    kept = memory(model=model, config=limited(8).config, keep_texts=True)
    written = kept.write(WORDS, labels=[text[-5:].strip() for text in WORDS])
    assert int(kept.counts([0]).atoms) == 8
    assert written.ids.tolist() == list(range(192))
    torch.testing.assert_close(
        kept.memory.members(0).vectors[150], normalize(pooled(model, WORDS[150]), dim=0),
        rtol=1e-4, atol=1e-5,
    )  # fmt: skip
    found = kept.recall(WORDS[100:150:10], top_k=1, top_atoms=8)
    assert found.texts == [[text] for text in WORDS[100:150:10]]
    assert [row[0] for row in found.labels] == [text[-5:].strip() for text in WORDS[100:150:10]]
