"""SGLang's classify path gives the numbers that the model gives in torch, from its cache too, and after a swap."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from envclient.base.errors import WireError
from rollout.adapters.sglang_scorer import SglangScorer
from rollout.predictor.model import LengthModel, load
from tests.conftest import MODEL, TOKEN

pytestmark = pytest.mark.sglang
TOLERANCE = 1e-4


def made(folder: Path, seed: int) -> LengthModel:
    """A head with something to say, on the shipped model's trunk."""
    torch.manual_seed(seed)
    model = load(MODEL, 4.0)
    torch.nn.init.normal_(model.score.weight, std=0.1)
    model.save(folder)
    return load(folder)


def test_served_scores_are_the_models(tmp_path: Path) -> None:
    first, second = made(tmp_path / "a", 0), made(tmp_path / "b", 1)
    rng = np.random.default_rng(0)
    texts = [rng.integers(3, 2000, length).tolist() for length in (600, 17, 333, 1, 90)]
    grown = [text + rng.integers(3, 2000, 30).tolist() for text in texts[1:]]
    scorer = SglangScorer(
        folder=tmp_path / "a", log=tmp_path / "engine.log", token=TOKEN, context_tokens=640, kv_tokens=8192, slots=8
    )

    async def scenario() -> None:
        try:
            await scorer.start()
            for batch in (texts, grown, grown[:1], texts):  # the last three come out of its cache, in part or whole
                assert await scorer.score(batch) == pytest.approx(first.predict(batch), abs=TOLERANCE)
            await scorer.load(tmp_path / "b")
            scores = await scorer.score(texts)
            assert scores == pytest.approx(second.predict(texts), abs=TOLERANCE)
            assert max(abs(a - b) for a, b in zip(scores, first.predict(texts), strict=True)) > 0.01
            with pytest.raises(WireError):
                await scorer.load(tmp_path / "nowhere")
            assert await scorer.score(grown) == pytest.approx(second.predict(grown), abs=TOLERANCE)
        finally:
            await scorer.stop()

    asyncio.run(asyncio.wait_for(scenario(), 250))
