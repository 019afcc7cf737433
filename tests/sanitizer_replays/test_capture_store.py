"""Captures on disk: what is written is read back and verified, and anything else is refused with its reason."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from made_captures import make_capture
from torch import Tensor

from alphamoe_sanitizer_replays.captures import store as capture_store
from alphamoe_sanitizer_replays.captures.records import Capture, TensorInfo, TensorRole
from alphamoe_sanitizer_replays.captures.store import check_room, find_captures, open_capture, write_capture
from alphamoe_sanitizer_replays.captures.tensors import bytes_of, save_tensors, tensor_sha256, typed
from alphamoe_sanitizer_replays.replays.job import prepare_inputs
from alphamoe_tracers.errors import AlphaMoEError, EvidenceError, UsageError


def blank(**changes: Any) -> Capture:
    """Give a capture that holds nothing yet."""
    fields: dict[str, Any] = {
        "plugin": "callable",
        "symbols": ("kernel",),
        "run_id": None,
        "rank": 0,
        "rank_source": "none",
        "world_size": None,
        "layer": 0,
        "M": 3,
        "tensors": (),
        "gpu_name": None,
        "compute_capability": None,
        "versions": {},
        "created": "2026-01-31T00:00:00Z",
        "bytes": 0,
    }
    return Capture(**(fields | changes))


def tensors() -> dict[str, tuple[TensorRole, Tensor]]:
    """Give tensors of every awkward kind: shared memory, views, no elements, no dimensions, rare dtypes."""
    x = torch.randn((3, 4), generator=torch.Generator().manual_seed(0))
    return {
        "x": ("input", x),
        "same": ("input", x),
        "columns": ("input", x[:, 1:3]),
        "fp8": ("input", x.to(torch.float8_e4m3fn)),
        "scales": ("input", torch.ones(4, dtype=torch.float8_e8m0fnu)),
        "scalar": ("input", torch.tensor(7, dtype=torch.int32)),
        "empty": ("input", torch.empty((0, 4), dtype=torch.bfloat16)),
        "mask": ("input", torch.tensor([True, False])),
        "conjugate": ("input", torch.complex(x, x).conj()),
        "out": ("output", x.t().to(torch.bfloat16)),
    }


def weights() -> dict[str, Tensor]:
    """Give a seeded weight and its scale."""
    w = torch.randn((8, 8), generator=torch.Generator().manual_seed(1))
    return {"w": w.to(torch.float8_e4m3fn), "w_scale": w[:1, :2]}


def same(left: Tensor, right: Tensor) -> bool:
    """Say whether dtype, shape and every byte agree."""
    return left.dtype == right.dtype and left.shape == right.shape and tensor_sha256(left) == tensor_sha256(right)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A capture with stored weights beside it."""
    directory = tmp_path / "rank=0" / "one"
    write_capture(directory, blank(), tensors(), weights=weights(), weights_directory=directory.parent)
    return directory


def edit(directory: Path, **changes: Any) -> None:
    """Change fields of capture.json."""
    path = directory / "capture.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensor(directory: Path, name: str, /, **changes: Any) -> None:
    """Change fields of one tensor's description."""
    infos = json.loads((directory / "capture.json").read_text())["tensors"]
    edit(directory, tensors=[info | changes if info["name"] == name else info for info in infos])


def test_every_tensor_is_read_back_with_dtype_shape_and_bytes(stored: Path) -> None:
    """Views are stored in C order; nothing else of a tensor changes."""
    opened = open_capture(stored)
    opened.verify()
    wanted = {name: tensor for name, (_, tensor) in tensors().items()} | weights()
    assert {info.name for info in opened.capture.tensors} == set(wanted)
    assert all(same(opened.load(name), tensor) for name, tensor in wanted.items())
    assert [info.role for info in opened.capture.tensors if info.name in ("x", "w", "out")] == [
        "input",
        "output",
        "weight",
    ]
    assert opened.missing() == ()
    assert opened.capture.bytes == bytes_of(tensors()) + bytes_of(weights())
    assert set(opened.capture.wall_s) == {"copy", "write"}


def test_weights_that_are_not_stored_keep_their_hash_and_say_how_to_store_them(tmp_path: Path) -> None:
    """Without a folder for weights only the hash is kept, which a weight that is drawn again can be checked by."""
    written = write_capture(tmp_path / "one", blank(), tensors(), weights=weights())
    opened = open_capture(tmp_path / "one")
    opened.verify()
    assert opened.missing() == ("w", "w_scale")
    assert written.tensor("w").sha256 == tensor_sha256(weights()["w"])
    assert written.bytes == bytes_of(tensors())
    with pytest.raises(EvidenceError, match="only the hash was kept") as raised:
        opened.load("w")
    assert "--capture-weights" in raised.value.hint


def test_captures_share_one_file_of_equal_weights(stored: Path) -> None:
    """A second capture with the same weights writes no second copy; other weights get a file of their own."""
    parent = stored.parent
    write_capture(parent / "two", blank(), tensors(), weights=weights(), weights_directory=parent)
    assert len(list(parent.glob("weights-*.safetensors"))) == 1
    other = {name: tensor.clone() for name, tensor in weights().items()}
    other["w_scale"] += 1
    write_capture(parent / "three", blank(), tensors(), weights=other, weights_directory=parent)
    assert len(list(parent.glob("weights-*.safetensors"))) == 2
    for name in ("two", "three"):
        open_capture(parent / name).verify()


def test_weights_inside_a_capture_move_with_it(tmp_path: Path) -> None:
    """With its own directory as the weights' folder, a capture is whole by itself."""
    directory = tmp_path / "one"
    write_capture(directory, blank(), tensors(), weights=weights(), weights_directory=directory)
    shutil.move(directory, tmp_path / "elsewhere")
    open_capture(tmp_path / "elsewhere").verify()


def test_an_existing_capture_is_never_overwritten(stored: Path) -> None:
    """The second writer of one name is refused and the first capture stays."""
    with pytest.raises(UsageError, match="is there already"):
        write_capture(stored, blank(M=9), tensors())
    assert open_capture(stored).capture.M == 3


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills up while the last file is written leaves no capture and no temporary directory."""

    def full(*_: object, **__: object) -> bytes:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(capture_store, "encode_json", full)
    with pytest.raises(OSError, match="No space"):
        write_capture(tmp_path / "one", blank(), tensors(), weights=weights(), weights_directory=tmp_path / "one")
    assert list(tmp_path.iterdir()) == []


def test_a_capture_that_does_not_fit_is_refused_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size needed and the room there is are both in the message, and nothing was created."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=capture_store.ROOM_KEPT_BYTES + 100))
    check_room(tmp_path / "not" / "there" / "yet", 100)
    needed = bytes_of(tensors())
    with pytest.raises(AlphaMoEError, match=f"a capture of {needed} bytes does not fit"):
        write_capture(tmp_path / "one", blank(), tensors())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("keep", [0, 20, -1])
def test_a_cut_file_is_an_evidence_error(stored: Path, keep: int) -> None:
    """Empty, cut inside the header, or short of a byte: named, never read as something else."""
    path = stored / "tensors.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(EvidenceError, match=r"tensors\.safetensors"):
        open_capture(stored).load("x")


def test_a_changed_byte_is_found_by_the_hash(stored: Path) -> None:
    """The last byte of the file belongs to some tensor; verifying names that tensor."""
    path = stored / "tensors.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(EvidenceError, match="was changed after it was written"):
        open_capture(stored).verify()


def test_shared_weights_that_are_gone_or_a_link_are_named(stored: Path, tmp_path: Path) -> None:
    """A missing weight file is told by its name; a link in its place is not followed."""
    (path,) = stored.parent.glob("weights-*.safetensors")
    path.rename(tmp_path / "moved")
    with pytest.raises(EvidenceError, match="missing, or not a plain file"):
        open_capture(stored).load("w")
    path.symlink_to(tmp_path / "moved")
    with pytest.raises(EvidenceError, match="not a plain file"):
        open_capture(stored).load("w")


@pytest.mark.parametrize(
    "file",
    [
        "/etc/passwd",
        "../../tensors.safetensors",
        "../tensors.safetensors",
        "a/tensors.safetensors",
        "../weights-0123456789ab.safetensors/../x",
        "weights.pkl",
        "",
    ],
)
def test_a_file_that_no_capture_has_is_refused(stored: Path, file: str) -> None:
    """Names that climb out, lead elsewhere or are of another kind are refused before anything is opened."""
    edit_tensor(stored, "x", file=file)
    with pytest.raises(EvidenceError, match="which no capture has"):
        open_capture(stored)


def test_a_newer_schema_is_refused_and_a_stranger_is_not_a_capture(stored: Path) -> None:
    """A newer version is a usage error, whatever else the file holds; another schema is no evidence."""
    edit(stored, schema="alphamoe-trace-capture-v2", unknown=1)
    with pytest.raises(UsageError, match="v2 is newer"):
        open_capture(stored)
    edit(stored, schema="something-else")
    with pytest.raises(EvidenceError, match="not a capture"):
        open_capture(stored)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"unknown": 1}, "unknown"),
        ({"rank": -1}, "rank -1"),
        ({"M": "3"}, "int"),
        ({"M": -3}, "M -3"),
    ],
)
def test_a_damaged_description_is_one_clear_error(stored: Path, changes: dict[str, Any], says: str) -> None:
    """Unknown fields, wrong types and impossible numbers are refused."""
    edit(stored, **changes)
    with pytest.raises(EvidenceError, match=says):
        open_capture(stored)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"shape": [4, 4]}, r"not float32 \[4, 4\]"),
        ({"dtype": "int32"}, "not int32"),
        ({"dtype": "load"}, "does not know"),
        ({"name": "other"}, "cannot be read"),
    ],
)
def test_a_description_that_does_not_fit_its_tensor_is_refused(
    stored: Path, changes: dict[str, Any], says: str
) -> None:
    """Shape, dtype and name are checked against the file before the bytes are given away."""
    edit_tensor(stored, "x", **changes)
    with pytest.raises(EvidenceError, match=says):
        open_capture(stored).load(changes.get("name", "x"))


def test_a_tensor_that_was_not_captured_is_named_with_those_that_were(stored: Path) -> None:
    """Asking for what is not there lists what is."""
    with pytest.raises(EvidenceError, match="no tensor 'bias'") as raised:
        open_capture(stored).load("bias")
    assert "columns" in raised.value.hint


def test_captures_are_found_in_a_folder_and_in_a_run_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    """Rank 10 comes after rank 2; half-written captures, links and folders outside ``captures`` are left out."""
    run = tmp_path / "run"
    for name in ("rank=10/layer=0", "rank=2/layer=11", "rank=2/layer=2"):
        write_capture(run / "captures" / name, blank(), tensors())
    shutil.copytree(run / "captures/rank=2/layer=2", run / "captures/rank=2/.layer=3.abc.tmp")
    shutil.copytree(run / "captures/rank=2/layer=2", run / "reports/old")
    (run / "captures/rank=2/layer=9").symlink_to(run / "captures/rank=2/layer=2")
    wanted = [run / "captures" / name for name in ("rank=2/layer=2", "rank=2/layer=11", "rank=10/layer=0")]
    assert find_captures(run / "captures") == wanted
    (run / "run.json").write_text("{}")
    assert find_captures(run) == wanted
    assert find_captures(wanted[0]) == [wanted[0]]
    assert find_captures(tmp_path / "run/captures/rank=10") == wanted[2:]
    with pytest.raises(UsageError, match="no directory"):
        find_captures(tmp_path / "nowhere")


def test_reading_a_description_needs_no_torch(stored: Path) -> None:
    """``sanitize`` lists captures before it decides what to start."""
    import subprocess
    import sys

    code = (
        "import sys; from pathlib import Path; from alphamoe_sanitizer_replays.captures.store import *;"
        f"print(open_capture(Path({str(stored)!r})).capture.label, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "rank 0 layer 0 M 3 False"


def test_outputs_of_a_dtype_that_the_format_has_not_come_back_typed(tmp_path: Path) -> None:
    """They are written as plain bytes; what does not fit the description stays as it is, to be told as another."""
    from safetensors.torch import load_file

    value = torch.view_as_complex(torch.arange(8.0).reshape(2, 2, 2))
    info = TensorInfo(name="out", role="output", dtype="complex64", shape=(2, 2), sha256="0" * 64, file=None)
    save_tensors(tmp_path / "o.safetensors", {"out": value})
    found = load_file(tmp_path / "o.safetensors")["out"]
    assert torch.equal(typed(found, info), value)
    assert typed(found[1:], info).dtype == torch.uint8


@pytest.mark.parametrize("backend", ["flashinfer_alphamoe", "triton"])
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"M": 4096}, "hidden_states is [3, 256], and [4096, 256]"),
        ({"M": 0}, "M 0"),
        ({"M": 10**18}, "M 1000000000000000000"),
        ({"rank": 4}, "rank 4 of 4 ranks"),
        ({"layer": -5}, "layer -5"),
        ({"layer": 2}, "layer 2 of a model of 2"),
        ({"world_size": 0}, "world_size 0"),
        ({"symbols": []}, "names no kernel"),
        ({"geometry": None}, "does not say its layer"),
        ({"geometry": {"E": 512, "H": 256, "I_local": 128, "top_k": 4}}, "is [16, 256, 256], and [512, 256, 256]"),
        ({"geometry": {"E": 16, "H": 2048, "I_local": 128, "top_k": 4}}, "and [3, 2048]"),
        ({"geometry": {"E": 16, "H": 256, "I_local": 128, "top_k": 10}}, "its top_k is 10"),
        ({"geometry": {"E": 16, "H": 256, "I_local": 0, "top_k": 4}}, "I_local 0"),
    ],
)
def test_labels_that_the_tensors_contradict_are_refused(
    tmp_path: Path, backend: str, changes: dict[str, Any], told: str
) -> None:
    """A scope is a sentence of labels: M, geometry, rank and layer must be able to be those of the tensors."""
    directory = make_capture(tmp_path, backend=backend).path
    own = open_capture(directory).capture.geometry
    assert own is not None
    if changes.get("geometry"):
        changes = {"geometry": {**changes["geometry"], "block_m": own.block_m}}
    edit(directory, **changes)
    with pytest.raises(EvidenceError) as caught:
        open_capture(directory)
    assert told in str(caught.value)


def test_a_block_size_that_the_plan_contradicts_is_refused(tmp_path: Path) -> None:
    """The plan's rows are its blocks times block_m, also where the argument was changed with the label."""
    directory = make_capture(tmp_path).path
    plain = json.loads((directory / "capture.json").read_text())
    edit(
        directory,
        geometry=plain["geometry"] | {"block_m": 16},
        arguments=plain["arguments"] | {"block_m": 16},
    )
    with pytest.raises(EvidenceError, match=r"sorted_token_ids is \[96\], and \[192\]"):
        open_capture(directory)


def test_another_plug_in_can_replay_a_capture_and_its_labels_are_held_against_it(stored: Path) -> None:
    """The name in the file may be wrong; one of ours is no way around the check."""
    assert open_capture(stored, plugin="mine:Mine").capture.plugin == "mine:Mine"
    with pytest.raises(EvidenceError, match="does not say its layer"):
        open_capture(stored, plugin="alphamoe_w8a8")


def test_a_path_that_is_not_utf_8_is_told_as_that(tmp_path: Path, stored: Path) -> None:
    """Nothing is damaged: safetensors cannot open it, so it is refused before a tensor is read or written."""
    odd = tmp_path / os.fsdecode(b"odd-\xff")
    shutil.copytree(stored, odd)
    with pytest.raises(UsageError, match="not UTF-8"):
        open_capture(odd)
    with pytest.raises(UsageError, match="not UTF-8"):
        write_capture(odd / "new", blank(), tensors())


def test_a_full_disk_is_told_by_what_was_to_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session's inputs are no capture, and capturing less is no way out there."""
    stored = make_capture(tmp_path / "captures")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(AlphaMoEError, match=r"what a replay reads of .* does not fit") as caught:
        prepare_inputs(stored, tmp_path / "inputs")
    assert "capture" not in caught.value.hint
