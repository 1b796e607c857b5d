"""The model in a distributed checkpoint, as Hugging Face tensors: its keys, and its rows block by block."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import torch

from ckpt_tools.dist_reader import DistCheckpoint
from ckpt_tools.hf_checkpoint import Block
from ckpt_tools.layout import Place, places
from ckpt_tools.safetensors_file import DTYPES
from envclient.base.errors import ConfigError
from megatron_venus.architecture import Architecture, architecture_in
from megatron_venus.weight_map import hf_shapes, row_runs

_NO_WEIGHT = ("optimizer.", "rng_state", "rerun_state")
"""Beginnings of keys that are no weights."""


class MegatronCheckpoint:
    """Weights in `dist`, complete and of the shapes that the config.json in `hf_dir` promises, of one type."""

    def __init__(self, dist: DistCheckpoint, hf_dir: Path, arch: Architecture) -> None:
        self.dist, self.hf_dir, self.arch = dist, hf_dir, arch
        self.places = {place.name: place for place in places(arch)}
        # A norm may be stored under either of two names.
        self._key = {n: next((k for k in p.keys if k in dist.tensors), p.keys[0]) for n, p in self.places.items()}
        self.dtype = self._check()

    @classmethod
    def open(cls, folder: Path, hf_dir: Path) -> MegatronCheckpoint:
        """Check the distributed checkpoint in `folder` against `hf_dir`/config.json.

        Raises:
            ConfigError: names the file or key that is missing, truncated, unknown, or of a wrong shape or type.
        """
        return cls(DistCheckpoint.open(folder), hf_dir, architecture_in(hf_dir, "--hf"))

    def _check(self) -> torch.dtype:
        where = f"checkpoint {str(self.dist.folder)!r}"
        remedy = f"it is not a checkpoint of the model that {self.hf_dir / 'config.json'} describes"
        dtypes: dict[torch.dtype, str] = {}
        for name, place in self.places.items():
            key = self._key[name]
            if key not in self.dist.tensors:
                raise ConfigError(f"{where} has no {key!r}", remedy)
            if self.dist.shape(key) != place.global_shape:
                raise ConfigError(
                    f"{where}: {key!r} has shape {self.dist.shape(key)}, not {place.global_shape}", remedy
                )
            dtypes[self.dist.dtype(key)] = key
        known = {key for place in self.places.values() for key in place.keys}
        for key in self.dist.tensors:
            if key not in known and not key.startswith(_NO_WEIGHT):
                raise ConfigError(f"{where}: {key!r} is unknown", remedy)
        for dtype, key in dtypes.items():
            if dtype not in DTYPES.values() or len(dtypes) > 1:
                others = ", ".join(str(other).removeprefix("torch.") for other in dtypes if other != dtype)
                raise ConfigError(
                    f"{where}: {key!r} has dtype {dtype}" + (f", others {others}" if others else ""),
                    "all weights must have one dtype of float32, bfloat16, float16",
                )
        return next(iter(dtypes))

    @property
    def nbytes(self) -> int:
        return sum(torch.Size(shape).numel() for shape in hf_shapes(self.arch).values()) * self.dtype.itemsize

    def units(self) -> list[str]:
        """What `blocks` takes: Megatron's parameters, in the model's order."""
        return list(self.places)

    def blocks(self, unit: str) -> Iterator[Block]:
        """The Hugging Face rows that the parameter holds; those of one tensor ascend."""
        place = self.places[unit]
        runs = row_runs(unit, self.arch)
        run, used = runs.pop(0), 0
        for start, end in self._row_intervals(place):
            box = (start, *(0,) * (len(place.shape) - 1)), (end - start, *place.shape[1:])
            rows = self.dist.read(self._key[unit], place.boxed(box)).reshape(box[1])
            while len(rows):
                count = min(len(rows), run.rows - used)
                yield Block(tensor=run.tensor, start=run.start + used, rows=rows[:count])
                rows, used = rows[count:], used + count
                if used == run.rows and runs:
                    run, used = runs.pop(0), 0

    def _row_intervals(self, place: Place) -> list[tuple[int, int]]:
        """Ends of stored chunks, as intervals of the parameter's rows: each chunk is read once."""
        axis = len(place.lead)
        cuts = {0, place.shape[0]}
        for offsets, sizes in self.dist.chunks_at(
            self._key[place.name], place.boxed(((0,) * len(place.shape), place.shape))
        ):
            cuts |= {offsets[axis], offsets[axis] + sizes[axis]}
        edges = sorted(cuts)
        return list(itertools.pairwise(edges))
