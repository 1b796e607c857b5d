"""The engine's contract, kept by SGLang and by the scripted engine alike."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Iterator

import pytest

from envclient.base.errors import WireError
from examples.agents.dialogue import system_prompt
from rollout.adapters.scripted_engine import ScriptedEngine
from rollout.protocol import GenerateRequest, Generation
from rollout.worker.chat import ChatCodec
from tests.conftest import MODEL, EngineHost

STOP = 2
# Far above 1 the distribution is nearly flat: a stop token is rare and generations are long.
FLAT = 50.0
_numbers = itertools.count()


@pytest.fixture(params=["scripted", pytest.param("sglang", marks=pytest.mark.sglang)])
def host(request: pytest.FixtureRequest, engine_loop: asyncio.AbstractEventLoop) -> Iterator[EngineHost]:
    if request.param == "sglang":
        yield request.getfixturevalue("sglang_host")
    else:
        engine = ScriptedEngine(seed=3, slots=32)
        host = EngineHost(engine, engine_loop)
        host.call(engine.start())
        yield host
        host.call(engine.stop())


@pytest.fixture
def slow_host(host: EngineHost) -> EngineHost:
    """Generations take long enough to be aborted."""
    if isinstance(host.engine, ScriptedEngine):
        host.engine._token_s = 0.002
        host.engine._stop_every = 1_000_000
    return host


def ask(
    ids: list[int], *, tokens: int = 8, temperature: float = 1.0, trajectory: str = "", name: str = ""
) -> GenerateRequest:
    number = next(_numbers)
    return GenerateRequest(
        request_id=name or f"r{number}",
        trajectory_id=trajectory or f"t{number}",
        input_ids=ids,
        max_new_tokens=tokens,
        temperature=temperature,
        stop_token_ids=[STOP],
    )


def prompt(number: int, length: int = 24) -> list[int]:
    return [3 + (number * 31 + i * 7) % 240 for i in range(length)]


def conversation() -> list[int]:
    """A prompt as in training: the model answers with a short call and the stop token, not always but nearly."""
    messages = [
        {"role": "system", "content": system_prompt("edit")},
        {"role": "user", "content": "Fix `f`. test_f: 1 != 2"},
    ]
    return ChatCodec(str(MODEL)).prompt_ids(messages)


def check(generation: Generation, request: GenerateRequest) -> None:
    ids = generation.token_ids
    assert len(ids) == len(generation.logprobs)
    assert len(ids) <= request.max_new_tokens
    assert all(math.isfinite(value) and value <= 1e-3 for value in generation.logprobs)
    assert STOP not in ids[:-1]
    if generation.finish_reason == "stop":
        assert ids[-1] == STOP
    elif generation.finish_reason == "length":
        assert len(ids) == request.max_new_tokens
        assert ids[-1] != STOP
    else:
        assert generation.finish_reason == "abort"


def test_counts_logprobs_and_reasons_over_more_requests_than_slots(host: EngineHost) -> None:
    talk = conversation()

    async def scenario() -> list[tuple[Generation, GenerateRequest]]:
        requests = [ask(talk if i % 2 else prompt(i), tokens=1 + i % 16) for i in range(80)]
        answers = await asyncio.gather(*map(host.engine.generate, requests))
        return list(zip(answers, requests, strict=True))

    answers = host.call(scenario())
    for generation, request in answers:
        check(generation, request)
        assert generation.finish_reason in ("stop", "length")
        assert generation.token_ids
    assert {generation.finish_reason for generation, _ in answers} == {"stop", "length"}


def test_greedy_is_deterministic_and_goes_on_from_any_cut(host: EngineHost) -> None:
    async def scenario(number: int) -> None:
        whole = await host.engine.generate(ask(prompt(number), tokens=12, temperature=0.0))
        again = await host.engine.generate(ask(prompt(number), tokens=12, temperature=0.0))
        assert whole.token_ids == again.token_ids
        for cut in range(1, len(whole.token_ids)):
            rest = ask(prompt(number) + whole.token_ids[:cut], tokens=12 - cut, temperature=0.0)
            generation = await host.engine.generate(rest)
            assert generation.token_ids == whole.token_ids[cut:]
            assert generation.finish_reason == whole.finish_reason

    for number in range(3):
        host.call(scenario(number))


def test_sampling_differs_between_trajectories(host: EngineHost) -> None:
    async def scenario() -> set[tuple[int, ...]]:
        answers = await asyncio.gather(
            *[host.engine.generate(ask(prompt(0), tokens=8, temperature=FLAT)) for _ in range(8)]
        )
        return {tuple(answer.token_ids) for answer in answers}

    assert len(host.call(scenario())) >= 7


def test_a_prefix_is_cached_until_flush(host: EngineHost) -> None:
    async def scenario() -> None:
        await host.engine.flush()
        first = await host.engine.generate(ask(prompt(5, 64), trajectory="cached"))
        assert first.cached_tokens == 0
        longer = prompt(5, 64) + first.token_ids + prompt(6, 8)
        second = await host.engine.generate(ask(longer, trajectory="cached"))
        assert 64 <= second.cached_tokens < len(longer)
        await host.engine.flush()
        third = await host.engine.generate(ask(longer, trajectory="cached"))
        assert third.cached_tokens == 0

    host.call(scenario())


def test_abort_all_returns_everything_with_its_tokens_so_far(slow_host: EngineHost) -> None:
    """Running and waiting requests; what came back goes on as prompt + tokens."""
    engine = slow_host.engine

    async def scenario() -> None:
        requests = [ask(prompt(i), tokens=500, temperature=FLAT) for i in range(40)]
        running = [asyncio.ensure_future(engine.generate(request)) for request in requests]
        while True:
            await asyncio.sleep(0.3)
            await engine.abort_all()
            _done, pending = await asyncio.wait(running, timeout=0.5)
            if not pending:
                break
        answers = [task.result() for task in running]
        aborted = [(a, r) for a, r in zip(answers, requests, strict=True) if a.finish_reason == "abort"]
        assert len(aborted) >= 30
        assert any(answer.token_ids for answer, _ in aborted)
        for answer, request in zip(answers, requests, strict=True):
            check(answer, request)
        await engine.flush()
        more = [ask(request.input_ids + answer.token_ids, tokens=5) for answer, request in aborted[:8]]
        for answer, request in zip(await asyncio.gather(*map(engine.generate, more)), more, strict=True):
            check(answer, request)
            assert answer.finish_reason in ("stop", "length")

    slow_host.call(scenario())


def test_abort_takes_exactly_the_named_request(slow_host: EngineHost) -> None:
    engine = slow_host.engine

    async def scenario() -> None:
        one = ask(prompt(1), tokens=400, temperature=FLAT, name="p1.0.1.0/1")
        other = ask(prompt(2), tokens=60, temperature=FLAT, name="p1.0.1.0/11")
        first = asyncio.ensure_future(engine.generate(one))
        second = asyncio.ensure_future(engine.generate(other))
        await asyncio.sleep(0.05)
        while not first.done():
            await engine.abort(one.request_id)
            await asyncio.sleep(0.05)
        assert first.result().finish_reason in ("abort", "stop")
        assert (await second).finish_reason in ("length", "stop")
        await engine.abort("nobody")

    slow_host.call(scenario())


def test_flush_is_refused_while_a_request_runs(slow_host: EngineHost) -> None:
    engine = slow_host.engine

    async def scenario() -> None:
        running = asyncio.ensure_future(engine.generate(ask(prompt(1), tokens=600, temperature=FLAT)))
        await asyncio.sleep(0.1)
        if isinstance(engine, ScriptedEngine):
            with pytest.raises(WireError):
                await engine.flush()
        while not running.done():
            await engine.abort_all()
            await asyncio.sleep(0.05)
        await engine.flush()

    slow_host.call(scenario())


def test_a_scripted_engine_that_died_answers_nothing(engine_loop: asyncio.AbstractEventLoop) -> None:
    engine = ScriptedEngine(token_s=0.01, stop_every=1_000_000)
    host = EngineHost(engine, engine_loop)

    async def scenario() -> None:
        await engine.start()
        running = asyncio.ensure_future(engine.generate(ask(prompt(1), tokens=400)))
        await asyncio.sleep(0.03)
        engine.die("no memory")
        with pytest.raises(WireError):
            await running
        with pytest.raises(WireError):
            await engine.generate(ask(prompt(1)))
        assert await engine.wait_dead() == "no memory"

    host.call(scenario())
