"""A run's model files and disk are checked before anything starts: each fault is one line that names it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tools import from_hf
from ckpt_tools.layout import Layout
from ckpt_tools.safetensors_file import create
from envclient.base.errors import ConfigError, VenusError
from megatron_venus import hf_folder, launch
from megatron_venus.architecture import Architecture
from megatron_venus.checkpoint_index import Checkpoint, Manifest, open_checkpoint
from megatron_venus.config import VenusConfig
from megatron_venus.hf_folder import read_weights
from megatron_venus.model_files import check_model_files, check_resumes
from megatron_venus.safetensors_header import INDEX
from megatron_venus.weight_map import hf_shapes
from tests.conftest import MODEL
from tests.unit import ckpt_kit

QUICKSTART = Path(__file__).parents[2] / "examples/configs/quickstart.yaml"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The shipped model in three shards, and `megatron` made of it, to spoil."""
    monkeypatch.setattr(hf_folder, "FILE_BYTES", 600_000)
    hf_folder.copy_companions(MODEL, tmp_path / "model")
    hf_folder.write_weights(tmp_path / "model", read_weights(MODEL))
    assert len(list((tmp_path / "model").glob("model-*-of-00003.safetensors"))) == 3
    from_hf.convert(tmp_path / "model", tmp_path / "megatron", layout=Layout(), quiet=True)
    return tmp_path / "model"


def config(model: Path, *overrides: str) -> VenusConfig:
    return launch.resolve(QUICKSTART, [f"model.path={model}", f"run.root={model.parent / 'runs'}", *overrides])


def refused(model: Path, message: str, *overrides: str) -> None:
    with pytest.raises(VenusError, match=message) as caught:
        check_model_files(config(model, *overrides), model.parent / "runs/x")
    assert "\n" not in str(caught.value)


def first_shard(folder: Path) -> Path:
    return min(folder.glob("model-*.safetensors"))


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 10)


def older(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": 1}))


FAULTS: list[tuple[str, Callable[[Path], Any], str]] = [
    ("no weights", lambda f: [path.unlink() for path in f.glob("model*")], "has neither"),
    ("missing shard", lambda f: first_shard(f).unlink(), "names shard 'model-00001-of-00003.*', which is not there"),
    ("truncated shard", lambda f: cut_short(first_shard(f)), r"model-00001.*truncated: \d+ of \d+ bytes"),
    ("broken index", lambda f: (f / INDEX).write_text("{"), "not a valid index"),
    (
        "another type",
        lambda f: ckpt_kit.edit_json(f / "config.json", dtype="bfloat16"),
        "dtype F32, config.json says dtype = 'bfloat16'",
    ),
    (
        "quantised",
        lambda f: ckpt_kit.replace_shard(
            first_shard(f), {"model.embed_tokens.weight": torch.zeros(2048, 64, dtype=torch.int8)}
        ),
        "model.embed_tokens.weight' has dtype I8",
    ),
]


@pytest.mark.parametrize(("spoil", "message"), [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS])
def test_files_of_the_model(model: Path, spoil: Callable[[Path], Any], message: str) -> None:
    check_model_files(config(model), model.parent / "runs/x")
    spoil(model)
    refused(model, message)


def test_the_launcher_asks(model: Path) -> None:
    cut_short(first_shard(model))
    with pytest.raises(ConfigError, match="truncated"):
        launch.main(["--config", str(QUICKSTART), "--dry-run", f"model.path={model}"])


MEGATRON_FAULTS: list[tuple[str, Callable[[Path], Any], str]] = [
    ("no folder", shutil.rmtree, r"megatron' is not a complete checkpoint: it has no manifest\.json"),
    ("broken manifest", lambda f: cut_short(f / "manifest.json"), "its manifest.json cannot be read"),
    ("other release", lambda f: older(f / "manifest.json"), r"made by another release \(schema 1, this one reads 2\)"),
    ("missing file", lambda f: (f / "megatron/__0_0.distcp").unlink(), "megatron/__0_0.distcp is missing"),
    ("truncated file", lambda f: cut_short(f / "megatron/__0_0.distcp"), r"__0_0\.distcp has \d+ of \d+ bytes"),
]


@pytest.mark.parametrize(
    ("spoil", "message"), [fault[1:] for fault in MEGATRON_FAULTS], ids=[fault[0] for fault in MEGATRON_FAULTS]
)
def test_megatron_folder(model: Path, spoil: Callable[[Path], Any], message: str) -> None:
    megatron = model.parent / "megatron"
    check_model_files(config(model, f"model.megatron={megatron}"), model.parent / "runs/x")
    spoil(megatron)
    refused(model, message, f"model.megatron={megatron}")


def test_megatron_folder_of_another_model(model: Path) -> None:
    """Other tensors, or the same tensors with other numbers: a norm tells."""
    megatron = model.parent / "megatron"
    other = ckpt_kit.make(model.parent / "other", "qwen3", tied=True, dtype=torch.float32)
    refused(
        other, "is of another model: it has no|is of another model: model.path has no", f"model.megatron={megatron}"
    )
    weights = read_weights(model)
    weights["model.norm.weight"] += 1e-3
    hf_folder.write_weights(model, weights)
    refused(model, r"is of other weights: model\.norm\.weight is not model\.path's", f"model.megatron={megatron}")


def test_disk_too_small_for_the_checkpoints(model: Path) -> None:
    """Weights of a quarter of the disk's free space (holes): a checkpoint of them, with Adam's moments, has no room."""
    rows = shutil.disk_usage(model).free // 4 // (64 * 4)
    ckpt_kit.edit_json(model / "config.json", vocab_size=rows)
    shapes = hf_shapes(Architecture.from_hf(json.loads((model / "config.json").read_text()), "x"))
    for path in model.glob("model*"):
        path.unlink()
    create(model / "model.safetensors", shapes, torch.float32)
    refused(
        model, r"run\.root=.*3 checkpoints of .* GB need .* GB, .* GB are there", "run.checkpoint_every=1", "steps=9"
    )
    refused(model, r"1 checkpoints of .* GB need", "run.checkpoint_every=0", "steps=9")


def test_resume_with_another_model(model: Path) -> None:
    made = open_checkpoint(model.parent / "megatron", "x")
    check_resumes(made, model)
    ckpt_kit.edit_json(model / "config.json", hidden_size=128)
    with pytest.raises(ConfigError, match=r"is of another model than model\.path=.*: hidden_size 64, not 128"):
        check_resumes(made, model)


def test_exported() -> None:
    def made(*files: str) -> Checkpoint:
        return Checkpoint(path=Path("x"), manifest=Manifest(step=1, weights={}, files=dict.fromkeys(files, 1)))

    assert made("hf/model.safetensors").exported and made("hf/model-00001-of-00002.safetensors").exported
    assert not made("hf/config.json", "megatron/__0_0.distcp").exported
