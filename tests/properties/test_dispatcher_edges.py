"""The dispatcher at the ends of its ranges, under every live policy: small, late, lost, stuck and empty."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from rollout.dispatcher import Dispatcher, DispatcherConfig
from rollout.policy.settings import PolicySettings
from rollout.types import ClosePrompt, PromptStatus, SealGroup, SetClass, TrajectoryStatus
from tests.properties.dispatcher_world import World
from tests.properties.test_dispatcher import LIVE, walk

FINISHED, FAILED, TRUNCATED = TrajectoryStatus.FINISHED, TrajectoryStatus.FAILED, TrajectoryStatus.TRUNCATED
every_policy = pytest.mark.parametrize("policy", LIVE)


def world(policy: str, *, kv_tokens: int = 60, turn_tokens: int = 3, **keys: Any) -> World:
    """Engines that obey classes, migrate, and hold a few contexts of 9 and more tokens."""
    keys = {"batch": 2, "group_size": 3, "workers": 2, "max_trajectories": 8, "deadline_s": 50.0} | keys
    settings = PolicySettings(name=policy, growth_tokens=0, buffer_tokens=0)
    config = DispatcherConfig(policy=settings, max_refills=keys.pop("max_refills", 1000), **keys)
    return World(config, priority=True, migration=True, kv_tokens=kv_tokens, turn_tokens=turn_tokens)


def closed(world: World) -> list[ClosePrompt]:
    return [command for _, _, commands in world.log for command in commands if isinstance(command, ClosePrompt)]


def sealed(world: World) -> list[SealGroup]:
    return [command for _, _, commands in world.log for command in commands if isinstance(command, SealGroup)]


@every_policy
@pytest.mark.parametrize("factor", [1.0, 4.0])
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 4, 1), (3, 1, 1), (2, 3, 2)], ids=lambda s: "B{} K{} W{}".format(*s))
def test_the_smallest_shapes_make_every_step(policy: str, factor: float, shape: tuple[int, int, int]) -> None:
    batch, size, workers = shape
    for places in (1, 8):
        here = world(
            policy, batch=batch, group_size=size, workers=workers, async_factor=factor, max_trajectories=places
        )
        here.drain(4)
        walk(here, Random(places), 150, benign=True)
        here.drain(2)
        here.check_end()
        assert here.steps_done >= 6


@every_policy
def test_beyond_the_promise_every_discard_has_a_cause_and_the_steps_go_on(policy: str) -> None:
    """async_factor 4.0 with S = 2: floor(4 B) > S B, so that what is too old is discarded and sampled anew."""
    here = world(policy, async_factor=4.0, max_resamples=1, max_trajectories=2, include_promoted=False)
    for seed in range(3):
        walk(here, Random(seed), 400, benign=True)
        here.drain(2)
    here.check_end()
    causes = [command.cause for command in closed(here) if command.status is PromptStatus.DISCARDED]
    assert all("begun under version" in cause or "weight versions" in cause for cause in causes)


@every_policy
@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_nothing_is_discarded_while_the_gate_allows_no_more_than_s_batches(policy: str, factor: float) -> None:
    here = world(policy, async_factor=factor, max_version_span=max(1, int(factor)), max_trajectories=3)
    here.promised_no_discards = True
    walk(here, Random(1), 800, benign=True)
    here.drain(3)
    assert here.dispatcher.statistics()["trajectories_discarded"] == 0


@every_policy
@pytest.mark.parametrize("fate", ["drop", "shrink"])
def test_groups_with_failed_members(policy: str, fate: str) -> None:
    """Member 0 fails at every attempt: the group is dropped with its name, or trained with the members left."""
    here = world(policy, on_lost_member=fate, max_resamples=1, async_factor=2.0)
    for _ in range(2):
        here.join()
    for turn in range(400):
        here.deliver_prompt()
        for _, episode in here.playable():
            failed = episode.trajectory_id.split(".")[2] == "0" and episode.abort is None
            here.finish(episode.trajectory_id, FAILED if failed else FINISHED)
        here.deliver_report(turn)
        here.replica(0)
        here.actor()
    assert here.stop_cause is None
    if fate == "drop":
        failures = [command for command in closed(here) if command.status is PromptStatus.FAILED]
        assert len(failures) > 5 and all(".0.1: the test said so" in command.cause for command in failures)
        assert not sealed(here)
    else:
        assert here.steps_done > 2 and {len(command.members) for command in sealed(here)} == {2}


@every_policy
def test_tools_that_never_return_are_ended_by_the_deadline(policy: str) -> None:
    """The first attempt of every member 1 hangs; parked time does not count, so nobody hides in the car park."""
    here = world(policy, async_factor=2.0, max_resamples=1)
    here.stuck = lambda trajectory: trajectory.endswith(".1.0")
    here.drain(3)
    here.check_end()
    statistics = here.dispatcher.statistics()
    assert here.steps_done == 3 and statistics["trajectories_failed"] >= 3 * here.config.batch
    assert all(member.split(".")[2:] != ["1", "0"] for command in sealed(here) for member in command.members)


@every_policy
def test_tools_that_hang_at_every_attempt_close_their_group_with_the_deadline_as_cause(policy: str) -> None:
    here = world(policy, async_factor=2.0, max_resamples=1)
    here.stuck = lambda trajectory: trajectory.startswith("p000001.")
    here.drain(3)
    (lost,) = [command for command in closed(here) if command.status is not PromptStatus.ACCEPTED]
    assert lost.prompt_id == "p000001" and "deadline_s = 50 s" in lost.cause


@every_policy
def test_turns_without_a_token(policy: str) -> None:
    here = world(policy, turn_tokens=0, async_factor=2.0)
    walk(here, Random(3), 400, benign=True)
    here.drain(3)
    here.check_end()
    assert here.steps_done >= 3 and {event.generated_tokens for event in here.reported.values()} <= {0}


@every_policy
@pytest.mark.parametrize("train", [True, False])
def test_a_context_at_its_limit(policy: str, train: bool) -> None:
    """A prompt that fills the context is no sample whatever the flag; a trajectory that was cut trains by the flag."""
    for generated in (False, True):
        here = world(policy, train_truncated=train, max_trajectories=128)
        here.join()
        here.join()
        for _ in range(2):
            here.deliver_prompt()
        while here.playable():
            for _, episode in here.playable():
                here.finish(episode.trajectory_id, TRUNCATED, generate=generated)
            while here.deliver_report(0):
                pass
            here.tick(5.0)
        if generated and train:
            assert len(sealed(here)) == 2 and not closed(here)
        else:
            said = "truncated trajectories do not train" if generated else "the prompt fills the context"
            assert len(closed(here)) == 2 and all(said in command.cause for command in closed(here))


@every_policy
@pytest.mark.parametrize("filtered", [True, False])
def test_all_rewards_equal(policy: str, filtered: bool) -> None:
    """Without the filter their advantages are 0; with it the run ends with a clear cause after bounded refills."""
    here = world(policy, filter_zero_variance=filtered, max_refills=5, async_factor=2.0)
    here.join()
    here.join()
    for turn in range(300):
        if here.stop_cause is not None:
            break
        here.deliver_prompt()
        here.end(turn, FINISHED, 1.0)
        here.deliver_report(turn)
        here.replica(0)
        here.actor()
        here.tick(0.1)
    if filtered:
        assert "step 1: 6 groups left untrained (6 filtered), more than max_refills = 5" in str(here.stop_cause)
    else:
        assert here.steps_done > 2
        assert all(set(command.advantages) == {0.0} for command in sealed(here))


@every_policy
def test_parked_demoted_and_promoted_ones_mixed_do_not_stand_still(policy: str) -> None:
    """Engines that hold two contexts, groups of all ages, a worker that is lost and comes back."""
    seen: set[str] = set()
    for seed in range(6):
        room = (1, 25, 60)[seed % 3]
        here = world(policy, kv_tokens=room, async_factor=2.0, max_trajectories=6, group_size=4, deadline_s=1e4)
        for part in range(10):
            walk(here, Random(10 * seed + part), 60, benign=True, estimates=False)
            here.tick(5.0)
        here.lose(seed)
        here.join()
        here.drain(4)
        here.check_end()
        for _, _, commands in here.log:
            for command in commands:
                if isinstance(command, SetClass):
                    seen.add(command.cause.split(":")[0])
    wanted = {
        "paper": {"promoted", "demoted"},
        "venus": {"promoted", "no room"},
        "program_aware": {"paused"},
        "program_aware_plus": {"paused", "promoted"},
    }
    assert seen >= wanted.get(policy, {"promoted"})


def test_constants_survive_the_record() -> None:
    config = DispatcherConfig(batch=3, async_factor=1.5, policy=PolicySettings(name="paper", fill=0.5))
    assert DispatcherConfig.from_recorded(config.recorded()) == config
    assert Dispatcher(DispatcherConfig.from_recorded(config.recorded())).config.gate_groups == 4
