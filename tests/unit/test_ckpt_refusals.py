"""Bad input: one clear line, and nothing is written; what was damaged later is found."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tools import from_hf, reshard, to_hf, verify
from ckpt_tools.hf_checkpoint import HfCheckpoint
from ckpt_tools.layout import Layout
from ckpt_tools.safetensors_file import create
from envclient.base.errors import VenusError
from megatron_venus.architecture import Architecture
from megatron_venus.safetensors_header import INDEX
from megatron_venus.weight_map import hf_shapes
from tests.unit import ckpt_kit


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ckpt")
    source = ckpt_kit.make(root / "hf", "qwen3", tied=True)
    from_hf.convert(source, root / "ckpt", layout=Layout(), quiet=True)
    return root


@pytest.fixture
def root(pristine: Path, tmp_path: Path) -> Path:
    """hf/ (sharded) and ckpt/ to spoil."""
    shutil.copytree(pristine, tmp_path, dirs_exist_ok=True)
    return tmp_path


def refused(root: Path, convert: Callable[[], None], message: str) -> None:
    """`convert` refuses in one line and leaves no file behind."""
    before = sorted(root.rglob("*"))
    with pytest.raises(VenusError, match=message) as caught:
        convert()
    assert "\n" not in str(caught.value)
    assert sorted(root.rglob("*")) == before


def first_shard(folder: Path) -> Path:
    return min(folder.glob("model-*.safetensors"))


def cut_short(path: Path, count: int = 10) -> None:
    os.truncate(path, path.stat().st_size - count)


def rename_in_index(folder: Path, old: str, new: str) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][new] = index["weight_map"].pop(old)
    (folder / INDEX).write_text(json.dumps(index))


def change_tensor(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    shard = json.loads((folder / INDEX).read_text())["weight_map"][name]
    ckpt_kit.replace_shard(folder / shard, {name: tensor})


HF_FAULTS: list[tuple[str, Callable[[Path], Any], str]] = [
    ("no folder", shutil.rmtree, "is not a folder"),
    ("no config", lambda f: (f / "config.json").unlink(), r"has no config\.json"),
    ("broken config", lambda f: (f / "config.json").write_text("{"), "not JSON"),
    ("another family", lambda f: ckpt_kit.edit_json(f / "config.json", model_type="gpt2"), "model_type = 'gpt2'"),
    (
        "another size",
        lambda f: ckpt_kit.edit_json(f / "config.json", hidden_size=64),
        r"shape \(96, 32\), not \(96, 64\)",
    ),
    ("more layers", lambda f: ckpt_kit.edit_json(f / "config.json", num_hidden_layers=3), r"layers\.2\..*is missing"),
    ("fewer layers", lambda f: ckpt_kit.edit_json(f / "config.json", num_hidden_layers=1), r"layers\.1\..*is unknown"),
    (
        "untied config",
        lambda f: ckpt_kit.edit_json(f / "config.json", tie_word_embeddings=False),
        "'lm_head.weight' is missing",
    ),
    ("missing shard", lambda f: first_shard(f).unlink(), "names shard 'model-00001-of-.*', which is not there"),
    ("truncated shard", lambda f: cut_short(first_shard(f)), r"model-00001.*truncated: \d+ of \d+ bytes"),
    ("truncated header", lambda f: os.truncate(first_shard(f), 40), "model-00001.*truncated"),
    ("empty shard", lambda f: os.truncate(first_shard(f), 0), "model-00001.*not a safetensors file"),
    ("appended bytes", lambda f: first_shard(f).open("ab").write(b"1234"), "4 bytes longer"),
    ("broken index", lambda f: (f / INDEX).write_text("[]"), "not a valid index"),
    (
        "index names absent",
        lambda f: rename_in_index(f, "model.norm.weight", "model.norm.bias"),
        r"model\.norm\.weight",
    ),
    (
        "shard lacks tensor",
        lambda f: change_tensor(f, "model.norm.weight", None),
        "names tensor 'model.norm.weight', which is not in",
    ),
    ("no weights", lambda f: [p.unlink() for p in f.glob("model*")], "has neither"),
    (
        "wrong shape",
        lambda f: change_tensor(f, "model.norm.weight", torch.zeros(31).bfloat16()),
        r"shape \(31,\), not \(32,\)",
    ),
    (
        "mixed types",
        lambda f: change_tensor(f, "model.norm.weight", torch.zeros(32)),
        "dtype F32, others BF16|dtype BF16, others F32",
    ),
    ("integers", lambda f: change_tensor(f, "model.norm.weight", torch.zeros(32, dtype=torch.int8)), "dtype I8"),
    (
        "not the stated type",
        lambda f: ckpt_kit.edit_json(f / "config.json", dtype="float16"),
        "dtype BF16, config.json says dtype = 'float16'",
    ),
]


@pytest.mark.parametrize(
    ("spoil", "message"), [fault[1:] for fault in HF_FAULTS], ids=[fault[0] for fault in HF_FAULTS]
)
def test_hugging_face_folder(root: Path, spoil: Callable[[Path], Any], message: str) -> None:
    spoil(root / "hf")
    refused(root, lambda: from_hf.convert(root / "hf", root / "out", layout=Layout(), quiet=True), message)


DIST_FAULTS: list[tuple[str, Callable[[Path], Any], str]] = [
    (
        "another model",
        lambda c: ckpt_kit.edit_json(c / "hf/config.json", hidden_size=64),
        r"shape \(96, 32\), not \(96, 64\)",
    ),
    (
        "more layers",
        lambda c: ckpt_kit.edit_json(c / "hf/config.json", num_hidden_layers=3),
        "not a checkpoint of the model",
    ),
    (
        "untied config",
        lambda c: ckpt_kit.edit_json(c / "hf/config.json", tie_word_embeddings=False),
        "no 'output_layer.weight'",
    ),
    (
        "no norms in config",
        lambda c: ckpt_kit.edit_json(c / "hf/config.json", model_type="llama"),
        "q_layernorm.weight' is unknown",
    ),
    ("missing file", lambda c: (c / "megatron/__0_0.distcp").unlink(), "'__0_0.distcp' .* is missing"),
    ("truncated file", lambda c: cut_short(c / "megatron/__0_0.distcp"), "'__0_0.distcp' is truncated"),
    ("truncated metadata", lambda c: cut_short(c / "megatron/.metadata"), ".metadata cannot be read"),
    (
        "other backend",
        lambda c: ckpt_kit.edit_json(c / "megatron/metadata.json", sharded_backend="zarr"),
        "backend 'zarr'",
    ),
    ("no metadata", lambda c: (c / "megatron/metadata.json").unlink(), "holds no checkpoint"),
    ("no config", lambda c: (c / "hf/config.json").unlink(), "--hf names"),
]


@pytest.mark.parametrize("tool", ["to_hf", "reshard"])
@pytest.mark.parametrize(
    ("spoil", "message"), [fault[1:] for fault in DIST_FAULTS], ids=[fault[0] for fault in DIST_FAULTS]
)
def test_distributed_checkpoint(root: Path, spoil: Callable[[Path], Any], message: str, tool: str) -> None:
    spoil(root / "ckpt")
    if tool == "to_hf":
        refused(root, lambda: to_hf.convert(root / "ckpt", root / "out", quiet=True), message)
    else:
        refused(root, lambda: reshard.rewrite(root / "ckpt", root / "out", layout=Layout(), quiet=True), message)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(tensor=3), "--tp 3 does not divide the model's 4 attention heads"),
        (Layout(tensor=4), "--tp 4 does not divide the model's 2 key-value heads"),
        (Layout(pipeline=3), "--pp 3 does not divide the model's 2 layers"),
        (Layout(tensor=0), "--tp 0 does not divide"),
        (Layout(expert=2), "--ep 2: the model has no experts"),
    ],
)
def test_layouts(root: Path, layout: Layout, message: str) -> None:
    refused(root, lambda: from_hf.convert(root / "hf", root / "out", layout=layout, quiet=True), message)
    refused(root, lambda: reshard.rewrite(root / "ckpt", root / "out", layout=layout, quiet=True), message)


def test_target_that_is_there(root: Path) -> None:
    refused(root, lambda: from_hf.convert(root / "hf", root / "ckpt", layout=Layout()), "exists already")
    refused(root, lambda: to_hf.convert(root / "ckpt", root / "hf"), "exists already")
    refused(root, lambda: to_hf.convert(root / "hf", root / "out"), "is a Hugging Face folder already")


def test_disk_too_small(root: Path) -> None:
    """A sparse checkpoint larger than the disk's free space; its tensors are holes, nothing is read."""
    rows = int(shutil.disk_usage(root).free * 1.05) // 64
    ckpt_kit.edit_json(root / "hf/config.json", vocab_size=rows)
    config = json.loads((root / "hf/config.json").read_text())
    for path in (root / "hf").glob("model*"):
        path.unlink()
    create(root / "hf/model.safetensors", hf_shapes(Architecture.from_hf(config, "x")), torch.bfloat16)
    refused(
        root, lambda: from_hf.convert(root / "hf", root / "out", layout=Layout(), quiet=True), r"needs .* GB, .* free"
    )


def test_tied_model_with_another_output_layer(root: Path) -> None:
    name = "lm_head.weight"
    index = json.loads((root / "hf" / INDEX).read_text())
    shard = index["weight_map"][name] = index["weight_map"]["model.norm.weight"]
    (root / "hf" / INDEX).write_text(json.dumps(index))
    ckpt_kit.replace_shard(root / "hf" / shard, {name: torch.zeros(96, 32).bfloat16()})
    refused(root, lambda: from_hf.convert(root / "hf", root / "out", layout=Layout()), "lm_head.weight differs")


def test_a_source_that_shrinks_meanwhile_leaves_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = HfCheckpoint.open

    def open_then_shrink(folder: Path, *, any_dtype: bool = False) -> HfCheckpoint:
        checkpoint = opened(folder, any_dtype=any_dtype)
        cut_short(first_shard(folder))
        return checkpoint

    monkeypatch.setattr(HfCheckpoint, "open", open_then_shrink)
    refused(root, lambda: from_hf.convert(root / "hf", root / "out", layout=Layout(), quiet=True), "became shorter")


def test_leftovers_of_a_killed_writer_go(root: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    stale, other = root / f".out.{dead.pid}.partial", root / f".out.{os.getppid()}.partial"
    for folder in (stale, other):
        (folder / "megatron").mkdir(parents=True)
    from_hf.convert(root / "hf", root / "out", layout=Layout(), quiet=True)
    assert not stale.exists()
    assert other.exists(), "its writer is alive"


def flip_byte(path: Path, where: int) -> None:
    with open(path, "r+b") as file:
        file.seek(where)
        byte = file.read(1)[0]
        file.seek(where)
        file.write(bytes([byte ^ 1]))


def run_verify(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ckpt_tools.verify", "--quiet", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_verify(root: Path) -> None:
    """Sound: exit code 0 and the same digest for both formats. One bit off or a NaN: 1. A file gone: 2, in one line."""
    sound = run_verify(root / "ckpt", "--against", root / "hf")
    assert sound.returncode == 0 and "ok, 24 tensors" in sound.stdout, sound
    checkpoint = HfCheckpoint.open(root / "hf")
    place = checkpoint.tensors["model.norm.weight"]
    flip_byte(place.path, place.offset + 4)
    differs = run_verify(root / "ckpt", "--against", root / "hf")
    assert differs.returncode == 1 and "fault: tensor 'model.norm.weight' differs from the one in" in differs.stdout
    (root / "ckpt/megatron/__0_0.distcp").unlink()
    gone = run_verify(root / "ckpt")
    assert gone.returncode == 2 and gone.stderr.startswith("error: ") and gone.stderr.count("\n") == 1


def test_verify_finds_numbers_that_are_not_finite(root: Path) -> None:
    norm = torch.ones(32).bfloat16()
    norm[3:5] = torch.tensor([float("nan"), float("inf")])
    change_tensor(root / "hf", "model.norm.weight", norm)
    _, faults = verify.read(HfCheckpoint.open(root / "hf"), quiet=True)
    assert faults == ["tensor 'model.norm.weight' has 2 numbers not finite"]


def test_damage_inside_a_distributed_checkpoint_is_found(root: Path) -> None:
    """Bytes of a weight changed on disk: `to_hf` refuses by the manifest's checksum and leaves nothing."""
    data = root / "ckpt/megatron/__0_0.distcp"
    raw = data.read_bytes()
    norm = ckpt_kit.weights_of(root / "hf")["model.norm.weight"].view(torch.uint8).numpy().tobytes()
    flip_byte(data, raw.index(norm) + 5)
    refused(
        root,
        lambda: to_hf.convert(root / "ckpt", root / "out", quiet=True),
        "'model.norm.weight' is not the one in its",
    )


def test_a_disk_that_fails_while_the_tool_writes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the disk answers to an early sync is told only once: it must end the conversion."""
    monkeypatch.setattr("ckpt_tools.flusher.FLUSH_BYTES", 1)

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        to_hf.convert(root / "ckpt", root / "out", quiet=True)
    assert sorted(path.name for path in root.iterdir()) == ["ckpt", "hf"]


def test_errors_of_the_commands_are_one_line(root: Path) -> None:
    command = [sys.executable, "-m", "ckpt_tools.to_hf", str(root / "nowhere"), str(root / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and "holds no checkpoint" in done.stderr and done.stderr.count("\n") == 1


def test_stopped_while_writing_leaves_nothing(root: Path) -> None:
    """SIGTERM in the middle: exit code 130, no output, nothing beside it."""
    ckpt_kit.edit_json(root / "hf/config.json", vocab_size=16_000_000)  # 1 GB of holes
    config = json.loads((root / "hf/config.json").read_text())
    for path in (root / "hf").glob("model*"):
        path.unlink()
    create(root / "hf/model.safetensors", hf_shapes(Architecture.from_hf(config, "x")), torch.bfloat16)
    before = sorted(root.rglob("*"))
    command = [sys.executable, "-m", "ckpt_tools.from_hf", str(root / "hf"), str(root / "out"), "--quiet"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while not list(root.glob(".out.*.partial/megatron/*.distcp")):
        assert process.poll() is None, "ended before it wrote anything"
        time.sleep(0.005)
    process.terminate()
    assert process.wait(timeout=240) == 130  # a busy disk may take long over one tensor of 1 GB
    assert sorted(root.rglob("*")) == before
