"""Token in, token out over the whole way: what the actor trained is what the engine was sent and what it sampled."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from megatron_venus.rollout_log import read_rollouts
from rollout.adapters.scripted_engine import ScriptedEngine
from rollout.protocol import GenerateRequest
from rollout.types import TrainSequence
from rollout.worker.chat import ChatCodec
from tests.e2e.launched import ROOT, SCRIPTED, Launched, check_account

MODEL = ROOT / "examples/models/tiny-qwen3-repair"
SEED_OF_W0 = sum(b"w0")
STEPS = 6
"""Enough that some trajectory is in the middle of a turn at one of the syncs."""


async def check(sequence: TrainSequence, stop_token_id: int) -> int:
    """Ask a fresh engine for every generated token again, from the context that was trained. Returns their number."""
    engine = ScriptedEngine(seed=SEED_OF_W0)
    await engine.start()
    context = list(sequence.prompt_ids)
    checked = 0
    for token, mask, logprob in zip(sequence.response_ids, sequence.loss_mask, sequence.logprobs, strict=True):
        if mask:
            again = await engine.generate(
                GenerateRequest(
                    request_id=str(checked),
                    trajectory_id=sequence.trajectory_id,
                    input_ids=context,
                    max_new_tokens=1,
                    temperature=1.0,
                    stop_token_ids=[stop_token_id],
                )
            )
            assert (again.token_ids, again.logprobs) == ([token], [logprob])
            checked += 1
        else:
            assert logprob == 0.0
        context.append(token)
    await engine.stop()
    return checked


@pytest.mark.timeout(240)
def test_trained_ids_are_the_engines(tmp_path: Path) -> None:
    """async_factor 1.5: some trajectories are cut by a weight update and go on from prompt + tokens."""
    overrides = [*SCRIPTED, f"steps={STEPS}", "async_factor=1.5", "run.save_rollouts=true"]
    with Launched(tmp_path, *overrides) as run:
        assert run.wait(200.0) == 0, run.text
        check_account(run.summary())
    rollouts = read_rollouts(tmp_path / "quickstart")
    sequences = [sequence for groups in rollouts.values() for group in groups for sequence in group.sequences]
    assert len(rollouts) == STEPS and len(sequences) == STEPS * 2 * 4
    stop = ChatCodec(str(MODEL)).stop_token_id
    checked = sum(asyncio.run(check(sequence, stop)) for sequence in sequences)
    assert checked == sum(sum(sequence.loss_mask) for sequence in sequences) > 100
    assert max(len({span.version for span in sequence.spans}) for sequence in sequences) == 2, "no seam was covered"
