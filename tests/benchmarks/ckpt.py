"""Conversion of checkpoints on disk against `cp` of the same bytes: speed and memory of from_hf and to_hf.

A synthetic Qwen3 checkpoint in shards is copied, converted, converted back, and copied again. Both sides end when the
bytes are durable (`cp`, then `sync` of the copies; the tools fsync). `ratio` = speed of the slower tool / speed of cp,
the mean of the two copies; the interpreter's start, measured as the tool's own dry run, is left out of it and reported.
Before each of the four nothing is written for a while: a virtual machine hands freed memory back to its host after some
seconds (free page reporting), and what comes right after an `rm` has up to four times cheaper pages than what does not.
Memory: the highest sum of anonymous and shared memory of the tool's process, seen every 20 ms.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ckpt_tools.hf_checkpoint import HfCheckpoint
from ckpt_tools.raw import write_from
from ckpt_tools.safetensors_file import create
from megatron_venus.architecture import Architecture
from megatron_venus.safetensors_header import INDEX
from megatron_venus.weight_map import hf_shapes

Say = Callable[[str], None]
SHARD_BYTES = 2_000_000_000
MEMORY_LIMIT = 2_000_000_000
SETTLE_S = 6.0
"""Pause before a measured command. Freed pages were cheap after 1 s and dear after 3 s."""
# Qwen3-4B; --quick keeps the layers' shapes.
CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
QUICK = {"num_hidden_layers": 4, "vocab_size": 32_000}


def run(quick: bool, say: Say) -> dict[str, Any]:
    """Copy, convert, convert back; `--quick` with 1 GB, otherwise 8 GB."""
    with tempfile.TemporaryDirectory(prefix="venus-ckpt-", dir=_roomy()) as root:
        source, megatron, back = (Path(root) / name for name in ("hf", "megatron", "back"))
        nbytes = make_checkpoint(source, CONFIG | (QUICK if quick else {}))
        say(f"{nbytes / 1e9:.2f} GB in {len(list(source.glob('*.safetensors')))} files; cp")
        copies = [_copy(source, Path(root) / "copy")]
        say("from_hf")
        from_hf = _measure("from_hf", source, megatron)
        say(f"cp again; from_hf took {from_hf['seconds']:.1f} s")
        copies.append(_copy(source, Path(root) / "copy"))
        say("to_hf")
        to_hf = _measure("to_hf", megatron, back)
        _check_equal(source, back)
        shutil.rmtree(megatron)
        shutil.rmtree(back)
        say("cp again")
        copies.append(_copy(source, Path(root) / "copy"))
    tools = {"from_hf": from_hf, "to_hf": to_hf}
    for tool, before, after in zip(tools.values(), copies, copies[1:], strict=False):
        copy_s = (before["seconds"] + after["seconds"]) / 2
        tool["ratio"] = copy_s / (tool["seconds"] - tool["start_s"])
        tool["ratio_with_start"] = copy_s / tool["seconds"]
    peak = max(tool["peak_bytes"] for tool in tools.values())
    return {
        "benchmark": "ckpt",
        "ratio": min(tool["ratio"] for tool in tools.values()),
        "baseline": "cp of the same files, then sync of the copies; mean of one right before and one right after",
        "sizes": {"bytes": nbytes, "subset": "1 GB of the 8 GB: 4 layers, 32,000 tokens" if quick else "all"},
        "load_average": os.getloadavg()[0],
        "peak_bytes": peak,
        "peak_within_2_gb": peak <= MEMORY_LIMIT,
        "cp": copies,
        **tools,
    }


def _roomy() -> Path | None:
    """/tmp may be memory: then the project's folder."""
    kind = subprocess.run(["stat", "-f", "-c", "%T", tempfile.gettempdir()], capture_output=True, text=True).stdout
    return Path.cwd() if kind.strip() == "tmpfs" else None


def make_checkpoint(folder: Path, config: dict[str, Any]) -> int:
    """A sharded checkpoint of random finite numbers; returns its weights' bytes."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    filled = total = 0
    for name, shape in hf_shapes(Architecture.from_hf(config, "benchmark")).items():
        nbytes = torch.Size(shape).numel() * 2
        if shards[-1] and filled + nbytes > SHARD_BYTES:
            shards.append({})
            filled = 0
        shards[-1][name] = shape
        filled, total = filled + nbytes, total + nbytes
    noise = torch.randn(16_000_003, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    weight_map: dict[str, str] = {}
    at = 0
    for number, shapes in enumerate(shards, 1):
        path = folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        stored = create(path, shapes, torch.bfloat16)
        weight_map |= dict.fromkeys(shapes, path.name)
        with open(path, "r+b", buffering=0) as file:
            for tensor in stored.values():
                done = 0
                while done < tensor.nbytes:
                    at = (at + 7919) % (len(noise) // 2)  # nothing repeats at a boundary
                    part = noise[at : at + (tensor.nbytes - done) // 2]
                    write_from(file.fileno(), part, tensor.offset + done)
                    done += part.nbytes
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    _sync(folder)
    return total


def _sync(folder: Path) -> None:
    subprocess.run(["sync", *(str(path) for path in folder.iterdir())], check=True)


def _copy(source: Path, target: Path) -> dict[str, float]:
    time.sleep(SETTLE_S)
    started = time.monotonic()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True, timeout=1200)
    copied = time.monotonic()
    _sync(target)
    ended = time.monotonic()
    shutil.rmtree(target)
    return {"seconds": ended - started, "without_sync_s": copied - started}


def _measure(tool: str, source: Path, out: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", f"ckpt_tools.{tool}", str(source), str(out), "--quiet"]
    dry, _ = _watched([*command, "--dry-run"])
    time.sleep(SETTLE_S)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds, peak = _watched(command)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "start_s": dry, "cpu_s": cpu_s, "peak_bytes": peak}


def _watched(command: list[str]) -> tuple[float, int]:
    """(seconds, most anonymous and shared bytes at once) of a process."""
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    peak = 0
    try:
        while process.poll() is None:
            peak = max(peak, _private_bytes(process.pid))
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, f"{command} ended with {process.returncode}"
    return time.monotonic() - started, peak


def _private_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def _check_equal(source: Path, back: Path) -> None:
    ours, theirs = HfCheckpoint.open(source), HfCheckpoint.open(back)
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name in ours.tensors:
        for block, other in zip(ours.blocks(name), theirs.blocks(name), strict=True):
            assert torch.equal(block.rows.view(torch.int16), other.rows.view(torch.int16)), name
