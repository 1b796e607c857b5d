"""HF → Megatron → another cut → HF: bit-equal for every family, tied and untied, whatever the block size."""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from ckpt_tools import dist_writer, from_hf, reshard, to_hf
from ckpt_tools.dist_reader import DistCheckpoint
from ckpt_tools.layout import Layout
from ckpt_tools.source import find
from ckpt_tools.verify import differences, read
from megatron_venus import weight_map
from megatron_venus.checkpoint_index import read_checkpoint
from tests.unit import ckpt_kit


@pytest.fixture(params=["whole", "blocks of 700 bytes"])
def block_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny blocks and files cut where large ones would be: inside heads, inside gate, across shards."""
    if request.param != "whole":
        for module in (from_hf, reshard):
            monkeypatch.setattr(module, "BLOCK_BYTES", 700)
        monkeypatch.setattr("ckpt_tools.hf_checkpoint.BLOCK_BYTES", 700)
        monkeypatch.setattr(dist_writer, "FILE_BYTES", 9_000)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ckpt_kit.FAMILIES)
@pytest.mark.usefixtures("block_size")
def test_there_and_back(family: str, tied: bool, tmp_path: Path) -> None:
    source = ckpt_kit.make(tmp_path / "source", family, tied=tied)
    experts = 2 if family == "qwen3_moe" else 1
    from_hf.convert(source, tmp_path / "a", layout=Layout(tensor=2, pipeline=2, expert=experts), quiet=True)
    reshard.rewrite(tmp_path / "a", tmp_path / "b", layout=Layout(), quiet=True)
    to_hf.convert(tmp_path / "b", tmp_path / "back", shard_bytes=20_000, quiet=True)

    original, back = ckpt_kit.weights_of(source), ckpt_kit.weights_of(tmp_path / "back")
    assert back.keys() == original.keys() and len(back) >= 20
    for name, tensor in original.items():
        assert back[name].dtype == tensor.dtype == torch.bfloat16
        assert torch.equal(back[name], tensor), name
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == back.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in back.values())
    assert len(set(index["weight_map"].values())) > 1

    checkpoint = read_checkpoint(tmp_path / "a")
    assert checkpoint is not None
    assert checkpoint.manifest.weights == {name: weight_map.checksum(tensor) for name, tensor in original.items()}
    for folder in (source, tmp_path / "a", tmp_path / "b", tmp_path / "back"):
        checksums, faults = read(find(folder).open(), quiet=True)
        assert not faults and not differences(checksums, checkpoint.manifest.weights, "x"), folder


def test_transformers_loads_the_export(tmp_path: Path) -> None:
    """Strictly, by names; not by `from_pretrained`, which leaves rotary frequencies unset beside a process group."""
    from transformers import AutoConfig, AutoModelForCausalLM

    def logits(folder: Path) -> torch.Tensor:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        model.load_state_dict(ckpt_kit.weights_of(folder))
        return model(torch.arange(3, 90)[None]).logits

    source = ckpt_kit.make(tmp_path / "source", "llama", tied=False, dtype=torch.float32)
    from_hf.convert(source, tmp_path / "ckpt", layout=Layout(), quiet=True)
    to_hf.convert(tmp_path / "ckpt", tmp_path / "back", quiet=True)
    assert [path.name for path in (tmp_path / "back").glob("*.safetensors*")] == ["model.safetensors"]
    with torch.no_grad():
        assert torch.equal(logits(source), logits(tmp_path / "back"))


def test_cut_is_the_layouts(tmp_path: Path) -> None:
    """A tensor-parallel rank's half of every matrix is a chunk of its own; layers lie in their stage's files."""
    source = ckpt_kit.make(tmp_path / "source", "qwen3", tied=False)
    from_hf.convert(source, tmp_path / "ckpt", layout=Layout(tensor=2, pipeline=2), quiet=True)
    dist = DistCheckpoint.open(tmp_path / "ckpt" / "megatron")
    cut = {key.removeprefix("decoder.layers."): set(dist.chunks(key)) for key in dist.tensors}
    assert cut["embedding.word_embeddings.weight"] == {((0, 0), (48, 32)), ((48, 0), (48, 32))}
    halves = [((layer, 0, at), (1, 32, 32)) for layer in (0, 1) for at in (0, 32)]
    assert cut["self_attention.linear_proj.weight"] == set(halves)
    quarters = [((layer, at, 0), (1, 24, 32)) for layer in (0, 1) for at in (0, 24, 48, 72)]
    assert cut["mlp.linear_fc1.weight"] == set(quarters)
    assert len(dist.files) == 4


def test_copy_of_tied_embedding_is_dropped(tmp_path: Path) -> None:
    source = ckpt_kit.make(tmp_path / "source", "qwen2", tied=True, shard="1GB")
    embedding = ckpt_kit.weights_of(source)["model.embed_tokens.weight"]
    ckpt_kit.replace_shard(source / "model.safetensors", {"lm_head.weight": embedding.clone()})
    from_hf.convert(source, tmp_path / "ckpt", layout=Layout(), quiet=True)
    to_hf.convert(tmp_path / "ckpt", tmp_path / "back", quiet=True)
    assert "lm_head.weight" not in ckpt_kit.weights_of(tmp_path / "back")


def test_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = ckpt_kit.make(tmp_path / "source", "qwen3", tied=True)
    from_hf.convert(source, tmp_path / "ckpt", layout=Layout(), dry_run=True)
    assert "dry run" in capsys.readouterr().out
    from_hf.convert(source, tmp_path / "ckpt", layout=Layout(), quiet=True)
    to_hf.convert(tmp_path / "ckpt", tmp_path / "back", dry_run=True)
    reshard.rewrite(tmp_path / "ckpt", tmp_path / "other", layout=Layout(tensor=2), dry_run=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "source"]


def test_type_in_config_follows_the_weights(tmp_path: Path) -> None:
    """A run may train in float32 what it loaded as bfloat16: the export says what it holds."""
    source = ckpt_kit.make(tmp_path / "source", "qwen3", tied=True, dtype=torch.float32)
    ckpt_kit.edit_json(source / "config.json", dtype="bfloat16")
    from_hf.convert(source, tmp_path / "ckpt", layout=Layout(), any_dtype=True, quiet=True)
    to_hf.convert(tmp_path / "ckpt", tmp_path / "back", quiet=True)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "float32"


def test_nobody_computes_crcs(tmp_path: Path) -> None:
    """torch's option is a thread's own, and the blobs are written by threads of a pool."""
    source = ckpt_kit.make(tmp_path / "source", "llama", tied=False)
    from_hf.convert(source, tmp_path / "ckpt", layout=Layout(), quiet=True)
    written = FileSystemReader(tmp_path / "ckpt/megatron").read_metadata().storage_data.values()
    assert len(written) > 10
    for place in written:
        whole = (tmp_path / "ckpt/megatron" / place.relative_path).read_bytes()
        with zipfile.ZipFile(io.BytesIO(whole[place.offset : place.offset + place.length])) as blob:
            (data,) = [entry for entry in blob.infolist() if entry.filename.endswith("/data/0")]
        start = data.header_offset + place.offset
        name, extra = (int.from_bytes(whole[start + at : start + at + 2], "little") for at in (26, 28))
        begin = start + 30 + name + extra
        assert zlib.crc32(whole[begin : begin + data.file_size]) != data.CRC
