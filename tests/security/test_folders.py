"""Folders of tensors: other people's files survive, strangers' files are refused, and a save that is
interrupted or killed anywhere leaves the old memory or the new."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from hidden_memory_support import Letters, memory
from hidden_memory_support import same as same_hidden
from hidden_memory_support import whole as hidden_state
from hidden_support import llama
from hostile import (
    VALUES,
    contents,
    first_contents,
    kinds,
    mutated_bytes,
    mutated_json,
    mutated_tensors,
    put,
)  # fmt: skip
from memory_support import chunks, filled, same, state
from report_support import MadeRun
from safetensors.torch import load, save

from rsm_torch import Calibration, HiddenStateMemory, StreamMemory
from rsm_torch.eval import manifest as run_manifest
from rsm_torch.eval.readers.reply_cache import ReplyCache
from rsm_torch.eval.report import ReportError, make_report
from rsm_torch.eval.report_figures import Choices
from rsm_torch.eval.run_folder import RunFolder
from rsm_torch.files import JOURNAL, ForeignFolder, write_whole
from rsm_torch.hidden.store import load as load_hidden
from rsm_torch.io import manifest_bytes

MINE = "mine alone"
MODEL = llama()


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch):
    """What the system holds, it holds through interrupts and kills; a test below counts the syncs."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.fixture
def rounds(request):
    """How many times to try, as `--rounds N` says, else as few as a test takes by itself."""
    asked = request.config.getoption("--rounds", default=None)
    return lambda few: few if asked is None else int(asked)


def saved(folder: Path) -> Path:
    filled().save_pretrained(folder)
    return folder


def hidden(folder: Path, text: str = "one") -> HiddenStateMemory:
    kept = memory(model=MODEL, keep_texts=True)
    kept.write([text, "two"], streams=[0, 1], labels=["a", 3])
    kept.save_pretrained(folder)
    return kept


def signed(file: Path, **changes) -> None:
    """Change a manifest and sign it again."""
    manifest = json.loads(file.read_text()) | changes
    manifest.pop("sha256", None)
    file.write_bytes(manifest_bytes(manifest))


def files(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text(errors="replace")
        for path in folder.rglob("*")
        if path.is_file()
    }


# -- other people's files ------------------------------------------------------------------------

FOREIGN = [
    "memory-experiments/thesis.txt", "memory-0000000000000000.safetensors", "memory-mine.safetensors",
    ".x.tmp", ".config.json.tmp", ".config.json.0123456789abcdef.tmp", ".memory-1/notes.txt",
    "memory-0000000000000000/config.json", "memory-11111111111111ab/thesis.txt", "README.md",
]  # fmt: skip


@pytest.mark.parametrize("kind", ["tensors", "hidden"])
def test_saving_touches_nothing_of_anybody_else(tmp_path, kind):
    save_into = hidden if kind == "hidden" else saved
    save_into(tmp_path)
    for name in FOREIGN:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(MINE)
    for _ in range(3):
        save_into(tmp_path)
    left = files(tmp_path)
    assert {name: left.pop(name) for name in FOREIGN} == dict.fromkeys(FOREIGN, MINE)
    assert len(left) == (3 if kind == "hidden" else 2)  # one memory, no journal


def test_what_is_put_into_a_folder_of_ours_survives_it(tmp_path):
    hidden(tmp_path)
    place = load_hidden(tmp_path).place
    (place / "thesis.txt").write_text(MINE)
    (place / JOURNAL).write_text('["thesis.txt"]')  # as if a save had noted it
    hidden(tmp_path)
    assert files(place) == {"thesis.txt": MINE}
    assert load_hidden(tmp_path).place != place


NAMES = ["thesis.txt", "../thesis.txt", "memory-experiments", "config.json", ".", "", 3, None]


@pytest.mark.parametrize("name", NAMES, ids=repr)
@pytest.mark.parametrize("where", ["manifest", "journal"])
def test_a_crafted_folder_cannot_have_anything_else_removed(tmp_path, where, name):
    folder = saved(tmp_path / "m")
    for place in (folder, tmp_path):
        (place / "thesis.txt").write_text(MINE)
    (folder / "memory-experiments").mkdir()
    if where == "manifest":
        about = json.loads((folder / "config.json").read_text())["tensors"]
        signed(folder / "config.json", tensors=about | {"file": name})
    else:
        (folder / JOURNAL).write_text(json.dumps([name]))
    saved(folder)
    assert (folder / "thesis.txt").read_text() == (tmp_path / "thesis.txt").read_text() == MINE
    assert (folder / "memory-experiments").is_dir()
    assert not (folder / JOURNAL).exists()
    StreamMemory.from_pretrained(folder)


@pytest.mark.parametrize(
    "raw", [b"", b"[", b"\xff", b'["memory-0000000000000000.safetensors"]', b"{}"]
)
def test_a_journal_that_says_nothing_of_use_is_passed_over(tmp_path, raw):
    folder = saved(tmp_path)
    (folder / JOURNAL).write_bytes(raw)
    saved(folder)
    assert len(files(folder)) == 2


def test_a_first_save_that_was_killed_does_not_make_the_folder_somebody_elses(tmp_path):
    name = "memory-0123456789abcdef.safetensors"
    (tmp_path / JOURNAL).write_text(json.dumps([name]))
    (tmp_path / name).write_text("half")
    (tmp_path / "notes.txt").write_text(MINE)
    with pytest.raises(ForeignFolder, match=r"has files in it and no config\.json"):
        saved(tmp_path)
    assert (tmp_path / name).exists()
    (tmp_path / "notes.txt").unlink()
    saved(tmp_path)
    assert len(files(tmp_path)) == 2
    assert name not in files(tmp_path)


def test_the_name_of_a_file_of_ours_may_be_taken(tmp_path):
    kept = filled()
    kept.save_pretrained(tmp_path / "a")
    (tensors,) = (tmp_path / "a").glob("*.safetensors")
    good = tensors.read_bytes()
    tensors.write_bytes(good[:-1])  # damaged: the same memory saved again mends it
    kept.save_pretrained(tmp_path / "a")
    assert tensors.read_bytes() == good
    other = saved(tmp_path / "b")
    filled(seed=9).save_pretrained(other)
    (other / tensors.name).write_text(MINE)
    before = files(other)
    with pytest.raises(ForeignFolder, match=rf"{tensors.name}: is not of this memory; move it"):
        kept.save_pretrained(other)
    assert files(other) == before
    (other / tensors.name).write_bytes(good)  # the very same, as a copy: it becomes the memory's
    kept.save_pretrained(other)
    assert sorted(files(other)) == ["config.json", tensors.name]


def test_two_threads_that_save_into_one_folder_take_turns(tmp_path):
    kept, errors = [filled(seed=seed) for seed in range(3)], []

    def save_often(one):
        try:
            for _ in range(8):
                one.save_pretrained(tmp_path)
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=save_often, args=(one,)) for one in kept]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert errors == []
    assert len(files(tmp_path)) == 2
    last = state(StreamMemory.from_pretrained(tmp_path))
    assert sum(same(last, state(one)) for one in kept) == 1


def test_the_disk_has_the_tensors_before_the_manifest_and_that_before_anything_goes(
    tmp_path, monkeypatch
):
    saved(tmp_path)
    did: list[str] = []
    real = {name: getattr(os, name) for name in ("fsync", "replace")}

    def name_of(path: Path) -> str:
        return "journal" if path.name == JOURNAL else path.suffix or "folder"

    def synced(file) -> None:
        number = file if isinstance(file, int) else file.fileno()
        did.append(name_of(Path(os.readlink(f"/proc/self/fd/{number}"))))
        real["fsync"](number)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", lambda *a: (did.append("replace"), real["replace"](*a)))
    remove = Path.unlink
    monkeypatch.setattr(
        Path, "unlink", lambda self, **k: (did.append(f"-{name_of(self)}"), remove(self, **k))
    )
    filled(seed=5).save_pretrained(tmp_path)
    assert did == [
        "journal", "folder", ".safetensors", ".tmp", "folder", "replace", "folder",
        "-.safetensors", "-journal",
    ]  # fmt: skip


def test_a_file_is_replaced_at_once_and_what_is_no_file_is_written_to(tmp_path):
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("old")
    real.chmod(0o600)
    link.symlink_to(real)
    write_whole(link, b"new")
    assert link.is_symlink()
    assert real.read_bytes() == b"new"
    assert real.stat().st_mode & 0o777 == 0o600
    write_whole(Path("/dev/null"), b"gone")
    assert not Path("/dev/null").is_file()
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    got: list[bytes] = []
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader.start()
    write_whole(pipe, b"through")
    reader.join()
    assert got == [b"through"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.json", "pipe", "real.json"]


# -- names and kinds of files ----------------------------------------------------------------------


def special(kind: str, path: Path, good: bytes, outside: Path) -> None:
    """Put something that is no regular file in the place of one."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        target = {"link": outside, "link within": path.with_name("other"), "device": "/dev/zero"}[
            kind
        ]
        if kind != "device":
            Path(target).write_bytes(good)
        path.symlink_to(target)


@pytest.mark.parametrize("kind", ["pipe", "folder", "link", "link within", "device"])
@pytest.mark.parametrize(
    "which", ["manifest", "tensors", "hidden manifest", "inner manifest", "run"]
)
def test_only_regular_files_are_read(tmp_path, which, kind):
    folder = tmp_path / "m"
    if which == "run":
        MadeRun(lambda *_: 1.0).write(folder)
        file, reading = folder / "results.jsonl", lambda: make_report([folder])
    elif which in ("manifest", "tensors"):
        saved(folder)
        file = next(folder.glob("*.safetensors" if which == "tensors" else "config.json"))
        reading = lambda: StreamMemory.from_pretrained(folder)  # noqa: E731
    else:
        hidden(folder)
        file = next(folder.rglob("config.json" if which == "inner manifest" else "hidden*.json"))
        reading = lambda: HiddenStateMemory.from_pretrained(folder, MODEL, Letters())  # noqa: E731
    special(kind, file, file.read_bytes(), tmp_path / "outside")
    wanted = {"pipe": "is a pipe", "folder": "is a folder"}.get(kind, "is a symbolic link")
    with pytest.raises(ValueError, match=f"{file.name}: {wanted}, expected a regular file"):
        reading()


OUTSIDE = [
    "../outside.safetensors", "/dev/zero", "sub/memory-0123456789abcdef.safetensors", "..", ".", "",
    "memory-0123456789abcdef.safetensors\x00", "memory-0123456789ABCDEF.safetensors", "config.json",
    "memory-0123456789abcdef.safetensors/../x", "\\memory-0123456789abcdef.safetensors", None, 1, [],
]  # fmt: skip


@pytest.mark.parametrize("name", OUTSIDE, ids=repr)
def test_a_manifest_names_only_files_beside_it(tmp_path, name):
    folder = saved(tmp_path / "m")
    (tensors,) = folder.glob("*.safetensors")
    data = tensors.read_bytes()
    (tmp_path / "outside.safetensors").write_bytes(data)
    about = json.loads((folder / "config.json").read_text())["tensors"]
    signed(folder / "config.json", tensors=about | {"file": name})
    with pytest.raises(
        ValueError, match=r"config\.json: (names .*, expected memory-|file: expected str)"
    ):
        StreamMemory.from_pretrained(folder)


@pytest.mark.parametrize(
    "name", ["../other", "/", ".", "", "memory-0123456789abcdef/..", 3, "link"]
)
def test_a_hidden_memory_names_only_a_folder_in_its_own(tmp_path, name):
    hidden(tmp_path / "m")
    hidden(tmp_path / "other")
    inside = load_hidden(tmp_path / "other").place
    file = tmp_path / "m" / "hidden_states.json"
    if name == "link":
        name = "memory-0123456789abcdef"
        (tmp_path / "m" / name).symlink_to(inside)
    digest = hashlib.sha256((inside / "config.json").read_bytes()).hexdigest()
    signed(file, memory={"folder": name, "config_sha256": digest})
    with pytest.raises(
        ValueError, match=r"hidden_states\.json: (names .*, expected a folder|folder: )"
    ):
        HiddenStateMemory.from_pretrained(tmp_path / "m", MODEL, Letters())


# -- values ------------------------------------------------------------------------------------------


def changed(tensors, name, at, value):
    tensors = {k: v.clone() for k, v in tensors.items()}
    tensors[name].view(-1)[at] = value
    return tensors


NAN, INF = float("nan"), float("inf")
# A memory of 3 streams with 40 members each: (tensor, place, value, what is said).
FAULTS = [
    ("member_atom", 0, -1, "member_atom: (row 0 is -1, of|holds values from -1)"),
    ("member_atom", 3, 99, "member_atom: row 3 is 99, of"),
    ("counts", 0, 1, "counts: row 0 is 1, of"),
    ("counts", 0, 0, "counts: holds values from 0 to"),
    ("ids", 39, 40, "ids: one is there twice"),
    ("ids", 39, 3, "ids: 3 comes behind one as large"),
    ("ids", 0, -5, "ids: holds values from -5 to"),
    ("ids", 0, 2**62, "ids: holds values from 1 to 4611686018427387904"),
    ("atom_labels", 0, -1, "atom_labels: holds values from -1"),
    ("next_id", 0, 5, "next_id: is 5, expected more than 119"),
    ("next_id", 0, 2**63 - 1, "next_id: holds values from 9223372036854775807"),
    ("next_id", 0, -1, "next_id: holds values from -1"),
    ("sums", 30, NAN, "sums: holds values from nan to nan"),
    ("sums", 30, INF, "sums: holds values from .* to inf"),
    ("basis", 5, NAN, "basis: holds values from nan"),
    ("members", 5, 1e30, "members: holds values from .* to 1.0"),
    ("singular", 0, -1, "singular: holds values from -1.0"),
    ("labels", 0, -2, "labels: holds values from -2"),
    ("times", 0, INF, "times: holds an infinite one"),
    ("times", 0, -INF, "times: holds an infinite one"),
    ("uses", 0, -1, "uses: holds values from -1"),
    ("events", 0, -1, "events: holds values from -1"),
    ("n_members", 0, -1, "n_members: holds -1, expected 0 or more"),
]  # fmt: skip


@pytest.mark.parametrize("form", [contents, first_contents])
@pytest.mark.parametrize(("name", "at", "value", "says"), FAULTS, ids=str)
def test_values_no_memory_can_hold_are_refused_by_file_and_tensor(
    tmp_path, form, name, at, value, says
):
    if form is first_contents and name in ("basis", "singular"):
        return  # which are passed over in the first format
    kept = filled()
    kept.touch([1])
    ones = torch.ones(3, 1, dtype=torch.int64)
    kept.write(chunks(3, 1), ids=120 + ones.cumsum(0), times=ones, labels=ones)
    kept.forget([121, 122, 123])
    for slot in range(3):
        kept.atoms(slot)
    manifest, data = form(kept)
    good = load(data)
    put(tmp_path, manifest, data)
    StreamMemory.from_pretrained(tmp_path)
    put(tmp_path, manifest, save(changed(good, name, at, value)))
    with pytest.raises(ValueError, match=rf"memory-\w+\.safetensors: {says}"):
        StreamMemory.from_pretrained(tmp_path)


def test_an_int8_scale_and_a_name_twice_in_a_stream(tmp_path):
    kept = filled(storage="int8")
    kept.atoms(0)
    manifest, data = contents(kept)
    tensors = load(data)
    assert tensors["n_atoms"].min() > 1
    for name, value, says in (
        ("members_scale", NAN, "members_scale: holds values from nan"),
        ("basis_scale", -1, "basis_scale: holds values from -1.0"),
        ("atom_labels", tensors["atom_labels"][1], "atom_labels: .* comes behind one as large"),
    ):
        put(tmp_path, manifest, save(changed(tensors, name, 0, value)))
        with pytest.raises(ValueError, match=says):
            StreamMemory.from_pretrained(tmp_path)
    # The same name in two streams is right: a memory that was assigned to may have it.
    tensors["atom_labels"][int(tensors["n_atoms"][0])] = tensors["atom_labels"][0]
    put(tmp_path, manifest, save(tensors))
    StreamMemory.from_pretrained(tmp_path)


def test_labels_of_a_hidden_memory_are_among_its_names(tmp_path):
    hidden(tmp_path)
    signed(tmp_path / "hidden_states.json", labels=["a"])
    with pytest.raises(ValueError, match=r"memory-\w+: labels: holds 2, of 1"):
        HiddenStateMemory.from_pretrained(tmp_path, MODEL, Letters())


# -- structured mutations ----------------------------------------------------------------------------


def usable(kept: StreamMemory, folder: Path) -> None:
    """A memory that was loaded can be searched, written to and saved."""
    q = torch.randn(kept.streams, kept.config.dim)
    for atom_score in ("v1", "centroid", "full_basis"):
        assert not kept.search(q, atom_score=atom_score).scores.isnan().any()
    kept.write(torch.randn(kept.streams, 3, kept.config.dim))
    kept.save_pretrained(folder)
    StreamMemory.from_pretrained(folder)
    kept.compact(max_atoms=1)


def refused(error: Exception, folder: Path) -> bool:
    return isinstance(error, (ValueError, FileNotFoundError)) and str(folder) in str(error)


def fresh(folder: Path, n: int) -> Path:
    """A folder of its own for every round, since a save makes the next one's leftovers foreign."""
    return folder / str(n)


def test_mutated_memories_load_and_work_or_are_refused_in_one_line(tmp_path, rounds):
    base, loaded = kinds(), 0
    for n in range(rounds(300)):
        rng, (manifest, data), folder = random.Random(n), base[n % len(base)], fresh(tmp_path, n)
        which = rng.random()
        if which < 0.4:
            manifest = mutated_json(rng, manifest)
        elif which < 0.8:
            data = mutated_tensors(rng, data)
        else:
            data = mutated_bytes(rng, data)
        put(folder, manifest if isinstance(manifest, dict) else {"x": manifest}, data)
        try:
            kept = StreamMemory.from_pretrained(folder)
        except Exception as error:  # noqa: BLE001
            assert refused(error, folder), f"round {n}: {error!r}"  # noqa: PT017
            continue
        usable(kept, folder)
        loaded += 1
    assert loaded  # some mutations do no harm, so what follows loading was tried


def test_mutated_hidden_memories_load_and_work_or_are_refused_in_one_line(tmp_path, rounds):
    hidden(tmp_path / "good")
    good = json.loads((tmp_path / "good" / "hidden_states.json").read_text())
    good.pop("sha256")
    place = load_hidden(tmp_path / "good").place
    manifest, data = contents(StreamMemory.from_pretrained(place))
    for n in range(rounds(120)):
        rng, folder, about = random.Random(n), fresh(tmp_path, n), good
        inner = mutated_json(rng, manifest) if n % 3 == 1 else manifest
        tensors = mutated_tensors(rng, data) if n % 3 == 2 else data
        put(folder / place.name, inner if isinstance(inner, dict) else {}, tensors)
        raw = (folder / place.name / "config.json").read_bytes()
        memory_of = {"folder": place.name, "config_sha256": hashlib.sha256(raw).hexdigest()}
        about = good | {"memory": memory_of}
        if n % 3 == 0:
            about = mutated_json(rng, about)
        (folder / "hidden_states.json").write_bytes(
            manifest_bytes(about if isinstance(about, dict) else {})
        )
        try:
            kept = HiddenStateMemory.from_pretrained(folder, MODEL, Letters(), check_weights=False)
        except Exception as error:  # noqa: BLE001
            ours = refused(error, folder) or str(error).startswith(
                ("layer:", "layers:", "norm:", "pool:", "config:")
            )
            assert ours, f"round {n}: {error!r}"  # noqa: PT017
            continue
        kept.recall(["one"], streams=0)
        kept.write(["new"], labels=["b"])
        kept.save_pretrained(folder)


def test_mutated_calibrations_load_and_work_or_are_refused_in_one_line(tmp_path, rounds):
    good = Calibration(0.5, 0.7, 9, "e", torch.zeros(3), torch.eye(3)[:1]).to_dict()
    file = tmp_path / "c.json"
    for n in range(rounds(400)):
        rng = random.Random(n)
        raw = json.dumps(mutated_json(rng, good)).encode()
        file.write_bytes(
            raw if n % 5 else rng.choice([raw[: n % len(raw)], b"\xff" + raw, b"[" * 10**5])
        )
        try:
            found = Calibration.load(file)
        except Exception as error:  # noqa: BLE001
            assert refused(error, file), f"round {n}: {error!r}"  # noqa: PT017
            continue
        width = 3 if found.mean is None else len(found.mean)
        if found.directions is None or found.directions.shape[1] == width:
            found.transform(torch.randn(2, width))
            found.save(file)
            Calibration.load(file)


def test_mutated_runs_are_reported_or_refused_in_one_line(tmp_path, rounds):
    run = MadeRun(lambda *_: 1.0).write(tmp_path / "run")
    good = {file.name: file.read_bytes() for file in run.iterdir()}
    for n in range(rounds(60)):
        rng, name = random.Random(n), random.Random(n).choice(sorted(good))
        for file, raw in good.items():
            (run / file).write_bytes(raw)
        lines = good[name].splitlines()
        at = rng.randrange(len(lines)) if name.endswith("jsonl") else 0
        one = json.loads(lines[at] if name.endswith("jsonl") else good[name])
        changed_line = json.dumps(mutated_json(rng, one)).encode()
        if name.endswith("jsonl"):
            lines[at] = changed_line
            (run / name).write_bytes(b"\n".join(lines) + b"\n")
        else:
            (run / name).write_bytes(changed_line)
        try:
            made = make_report([run], Choices(resamples=9))
        except Exception as error:  # noqa: BLE001
            kind = (ReportError, run_manifest.ManifestError)
            assert isinstance(error, kind), f"round {n}: {error!r}"  # noqa: PT017
            continue
        made.markdown()


@pytest.mark.parametrize("value", VALUES, ids=lambda v: repr(v)[:20])
def test_a_manifest_may_be_anything(tmp_path, value):
    folder = saved(tmp_path)
    (folder / "config.json").write_text(json.dumps(value))
    with pytest.raises(ValueError, match=r"config\.json: "):
        StreamMemory.from_pretrained(folder)
    with pytest.raises(ValueError, match=r"config\.json: belongs to something else"):
        saved(folder)


# -- how much is allocated -----------------------------------------------------------------------

MEASURE = """
import json, sys
sys.path[:0] = sys.argv[2:]
from pathlib import Path
import torch
from bombs import BOMBS
from benchmarks.side_by_side.peak import peak_growth
for name, make in BOMBS.items():
    folder = Path(sys.argv[1]) / name
    load = make(folder)
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    said = []
    def call():
        try:
            load()
        except Exception as error:  # noqa: BLE001
            said.append(f"{type(error).__name__}: {error}"[:300])
    call()  # what is imported on the way is not counted
    print(json.dumps([name, size, peak_growth(call), said[0] if said else None]), flush=True)
"""


def test_a_crafted_file_is_refused_before_it_costs_memory(tmp_path):
    here = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path), *here],
        check=True,
        capture_output=True,
        text=True,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 9
    for name, size, grown, said in found:
        assert said is not None, name
        assert said.startswith("ValueError: "), (name, said)
        assert str(tmp_path) in said, (name, said)
        if grown is None:
            continue  # a system without /proc
        most = 32 if "json" in name else 6
        assert grown < most * size + 2**24, (name, size, grown, said)


# -- interrupts ----------------------------------------------------------------------------------


def dropped(test):
    """An interrupt may keep a `with` from closing its file, which Python then closes and says so."""
    for warning in ("ResourceWarning", "pytest.PytestUnraisableExceptionWarning"):
        test = pytest.mark.filterwarnings(f"ignore::{warning}")(test)
    return test


def interrupted(call, line: int, inside: str) -> bool:
    """Whether `call` came to its line number `line` of the library's, where it is interrupted."""
    seen = 0

    def each(frame, event, arg):
        nonlocal seen
        if event == "line":
            seen += 1
            if seen == line:
                raise KeyboardInterrupt
        return each

    before, grad = sys.gettrace(), torch.is_grad_enabled()
    sys.settrace(lambda frame, event, arg: each if inside in frame.f_code.co_filename else None)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
        # Python reports the line of a `with` once more before it calls `__exit__`: an interrupt
        # there skips it, and a mode of torch would stay on for the tests that come after.
        torch.set_grad_enabled(grad)
    return False


def memory_case(folder):
    old, new = filled(seed=1, T=5), filled(seed=2, T=5)
    return old, new, lambda: state(StreamMemory.from_pretrained(folder)), state, same


def hidden_case(folder):
    made = [memory(model=MODEL, keep_texts=True) for _ in range(2)]
    for kept, text in zip(made, ("one", "two"), strict=True):
        kept.write([text], labels=[text])
    read = lambda: hidden_state(HiddenStateMemory.from_pretrained(folder, MODEL, Letters()))  # noqa: E731
    return *made, read, hidden_state, same_hidden


@dropped
@pytest.mark.parametrize("case", [memory_case, hidden_case])
def test_an_interrupt_at_any_line_leaves_the_old_or_the_new(tmp_path, rounds, case):
    folder, few = tmp_path / "m", 1000  # every so many lines; by hand, every line of Python at all
    old, new, read, describe, alike = case(folder)
    old.save_pretrained(folder)
    (folder / "thesis.txt").write_text(MINE)
    one, two, expected, left = describe(old), describe(new), len(files(folder)), 0
    inside, step = ("rsm_torch", 23) if rounds(few) == few else ("/", 1)
    for line in range(1, step * rounds(few), step):
        reached = interrupted(lambda: new.save_pretrained(folder), line, inside)
        found = read()
        assert alike(found, one) or alike(found, two), f"line {line}"
        assert (folder / "thesis.txt").read_text() == MINE
        left += len(files(folder)) > expected
        old.save_pretrained(folder)
        assert alike(read(), one)
        assert len(files(folder)) == expected, f"line {line}"
        if not reached:
            break
    assert left  # some interrupts did leave files behind, which the next save removed


@dropped
def test_an_interrupt_at_any_line_leaves_the_old_calibration_or_the_new(tmp_path):
    file, line, reached = tmp_path / "c.json", 0, True
    while reached:
        line += 1
        Calibration(0.25, 0.7, 9).save(file)
        reached = interrupted(lambda: Calibration(0.75, 0.7, 9).save(file), line, "rsm_torch")
        assert Calibration.load(file).tau in (0.25, 0.75)
    assert line > 20


@dropped
def test_an_interrupt_at_any_line_of_a_runs_start_leaves_a_manifest_that_can_be_read(tmp_path):
    line, reached = -4, True
    while reached:
        line += 5
        folder = fresh(tmp_path, line)
        run_manifest.settle(folder, {"a": 1}, {"commit": "1"}, "x")
        again = partial(run_manifest.settle, folder, {"a": 1}, {"commit": "2"}, "x")
        reached = interrupted(again, line, "rsm_torch")
        made = [one["commit"] for one in run_manifest.read(folder)["made_with"]]
        assert made in (["1"], ["1", "2"])
        again()
        assert [file.name for file in folder.iterdir()] == ["manifest.json"]
    assert line > 50


KILLED = """
import os, signal, sys
sys.path[:0] = sys.argv[3:]
from pathlib import Path
import torch
from memory_support import filled, same, state
from rsm_torch import StreamMemory

torch.set_num_threads(1)
os.fsync = lambda file: None
folder = Path(sys.argv[1])
old, new = filled(seed=1, T=5), filled(seed=2, T=5)
old.save_pretrained(folder)
(folder / "thesis.txt").write_text("mine alone")
one, two = state(old), state(new)
line = left = 0
while True:
    line += int(sys.argv[2])
    child = os.fork()
    if child == 0:
        seen = 0
        def each(frame, event, arg):
            global seen
            seen += event == "line"
            if seen == line:
                os.kill(os.getpid(), signal.SIGKILL)
            return each
        sys.settrace(lambda frame, event, arg: each if "rsm_torch" in frame.f_code.co_filename else None)
        new.save_pretrained(folder)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    found = state(StreamMemory.from_pretrained(folder))
    assert same(found, one) or same(found, two), line
    assert (folder / "thesis.txt").read_text() == "mine alone"
    left += len(os.listdir(folder)) > 3
    old.save_pretrained(folder)
    assert same(state(StreamMemory.from_pretrained(folder)), one), line
    assert len(os.listdir(folder)) == 3, (line, os.listdir(folder))
    if status == 0:
        break
print(line, left)
"""


def test_a_kill_at_any_line_leaves_the_old_or_the_new(tmp_path, rounds):
    here = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
    step = "11" if rounds(11) == 11 else "1"
    command = [sys.executable, "-c", KILLED, str(tmp_path / "m"), step, *here]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    line, left = map(int, done.stdout.split())
    assert line > 100
    assert left > 5  # a killed save leaves files, and the next one removes them


# -- processes ---------------------------------------------------------------------------------------


def in_a_fork(call) -> str:
    """What a forked process says after `call`: nothing, or the error."""
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            call()
            said = ""
        except BaseException as error:  # noqa: BLE001
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        said = answer.read()
    os.wait()
    return said


def test_a_run_is_written_only_by_the_process_that_opened_it(tmp_path):
    row = {"dataset": "d", "method": "m", "seed": 0, "episode": "e", "budget": 1}
    with RunFolder(tmp_path) as folder:
        lines = folder.timings
        lines.add([row])
        before = lines.path.read_bytes()
        said = in_a_fork(lambda: lines.add([row]))
        assert said.startswith(
            f"RuntimeError: {lines.path}: was opened by process {os.getpid()}, and"
        )
        assert "write results in the process that opened the run" in said
        assert in_a_fork(lambda: folder.__exit__()) == ""
        assert lines.path.read_bytes() == before
        with pytest.raises(BlockingIOError):  # still held, though the fork closed it
            RunFolder(tmp_path)
        lines.add([row])
        assert lines.path.read_bytes() == 2 * before


def test_forked_processes_share_a_reply_cache_without_losing_answers(tmp_path):
    cache = ReplyCache(tmp_path / "replies.jsonl")
    cache.put("parent", {"text": "x" * 9000})
    children = []
    for child in range(4):
        pid = os.fork()
        if pid == 0:
            for n in range(25):
                cache.put(f"{child}-{n}", {"text": "y" * 9000})
            os._exit(0)
        children.append(pid)
    for n in range(25):
        cache.put(f"parent-{n}", {"text": "z" * 9000})
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 4
    assert len(ReplyCache(tmp_path / "replies.jsonl")) == 1 + 5 * 25
