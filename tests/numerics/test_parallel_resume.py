"""A run goes on from its checkpoint in another layout as if nothing had happened; in the same one, to the bit."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ckpt_tools import from_hf
from ckpt_tools.layout import Layout
from megatron_venus.checkpoint_index import find_all
from megatron_venus.config import ParallelConfig
from megatron_venus.hf_folder import read_weights
from tests.numerics import kit, resume_kit
from tests.numerics.resume_kit import Leg


def test_layout_changes_at_every_resume(tmp_path: Path) -> None:
    """Two replicas → tensor with sequence → virtual stages → one process, against one process all the way.

    Every layout could also start from a converted checkpoint. Every save runs beside a further step; a rank of the
    second layout then fails in a save.
    """
    folder = kit.make_model(tmp_path / "model", tied=True, layers=4)
    layouts = [
        (2, ParallelConfig(), True),
        (2, ParallelConfig(tensor=2, sequence=True), True),
        (2, ParallelConfig(pipeline=2, virtual_stages=2), False),
        (1, ParallelConfig(), False),
    ]
    run_dir = tmp_path / "run"
    from_hf.convert(folder, tmp_path / "megatron", layout=Layout(), quiet=True)
    for step, (ranks, parallel, twice) in enumerate(layouts, start=1):
        leg = Leg(
            folder=str(folder),
            run_dir=str(run_dir),
            until=step,
            parallel=parallel,
            twice=twice,
            megatron=str(tmp_path / "megatron"),
            failing_rank=1 if parallel.tensor == 2 else -1,
        )
        if ranks == 1:
            resume_kit.run(leg)
        else:
            (tmp_path / "leg").write_bytes(msgspec.msgpack.encode(leg))
            kit.run_module(ranks, "tests.numerics.resume_kit", str(tmp_path / "leg"))
    undisturbed = Leg(folder=str(folder), run_dir=str(tmp_path / "whole"), until=4, parallel=ParallelConfig())
    reference, before = resume_kit.run(undisturbed), read_weights(folder)
    last = find_all(run_dir)[-1]
    assert last.step == 4
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == [f"step_{n:06d}" for n in (1, 2, 3, 4)]
    for name, tensor in read_weights(last.hf_dir).items():
        moved, expected = tensor - before[name], reference[name] - before[name]
        # Adam turns a gradient's rounding near zero into a whole step: of the way, not of the weights.
        assert kit.relative_error(moved, expected) <= 1e-3, name
        assert kit.relative_error(tensor, reference[name]) <= 1e-5, name
