"""Closed form: what a candidate cannot exceed, and what binds it on paper. Used to choose what is worth simulating.

With B groups of K trajectories a step, seconds of a step are at least each of

* trainer: B·K·E[s(L)] / replicas + optimizer + sync, s(L) = 3 · (2·P·L + a·L²) / (GPUs of a replica · peak · MFU):
  forward and backward of a context of L tokens, MFU is `sim.trainer.efficiency`, replicas work side by side;
* engines: (B·K·(E[tokens]·(base/b + request) + kv·E[Σ context]) + prefill of what is new) / workers, where base,
  request and kv are the parts of a decode step and b the largest batch that slots, the gate and KV memory allow: where
  KV memory is what limits b, the bound is that of `kv`, where slots do, that of `slots`;
* sandboxes: B·K·E[life] / sandboxes (Little's law), life being that of a trajectory that is alone on its worker;
* gate: B·(E[longest life of a group] + optimizer + sync) / ⌊async_factor·B⌋ (Little's law for groups in flight).
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np

from rollout.sim.config import SimConfig
from rollout.sim.cost import EngineCost, engine_cost, train_cost
from rollout.sim.plan.config import PlanConfig
from rollout.sim.plan.space import Candidate, sim_config
from rollout.sim.workload import Script, make_workload


class Means(msgspec.Struct, frozen=True, kw_only=True):
    """Of the workload's trajectories, arrays of [groups, K]; tokens and seconds."""

    generated: np.ndarray
    context: np.ndarray
    """At the end."""
    prompt: np.ndarray
    attended: np.ndarray
    """Σ over generated tokens of the context that each attends to."""
    waits_s: np.ndarray
    """Opening, tools and score: seconds that no engine shortens."""

    @property
    def decode_context(self) -> float:
        """Context of a trajectory while it generates, mean over generated tokens."""
        return float(self.attended.sum() / self.generated.sum())


def _attended(script: Script) -> float:
    total, context = 0.0, script.prompt_tokens
    for output, appended in zip(script.outputs, script.appended, strict=True):
        total += output * (context + output / 2)
        context += output + appended
    return total


def means(config: PlanConfig) -> Means:
    """Of the first `search.sample_groups` groups of the first seed, the stream that the simulations meet too.

    Raises:
        ConfigError: a workload that does not exist.
    """
    sim = replace(config.sim, seed=config.seeds[0])
    workload = make_workload(sim)
    size, environment = sim.group.size, sim.environment
    groups = [[workload.script(g, k, 0) for k in range(size)] for g in range(config.search.sample_groups)]

    def table(values: list[list[float]]) -> np.ndarray:
        return np.asarray(values, dtype=float)

    return Means(
        generated=table([[s.generated for s in group] for group in groups]),
        context=table([[s.context_tokens for s in group] for group in groups]),
        prompt=table([[s.prompt_tokens for s in group] for group in groups]),
        attended=table([[_attended(s) for s in group] for group in groups]),
        waits_s=table([[environment.open_s + sum(s.tools_s) + environment.score_s for s in group] for group in groups]),
    )


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """Smallest seconds of a step by what limits it."""

    trainer_s: float
    engines_s: float
    """Where neither KV memory nor slots limit the batch."""
    kv_s: float
    """The same with the batch that KV memory allows."""
    slots_s: float
    """The same with the batch that slots allow."""
    sandboxes_s: float
    gate_s: float
    tokens: float
    """Generated tokens of a step."""

    @property
    def step_s(self) -> float:
        return max(self.trainer_s, self.engines_s, self.kv_s, self.slots_s, self.sandboxes_s, self.gate_s)

    @property
    def tokens_per_hour(self) -> float:
        """No candidate trains more."""
        return self.tokens / self.step_s * 3600

    @property
    def estimate_s(self) -> float:
        """A guess of the step: bounds that are near each other add up (cubic mean). For order only."""
        parts = (self.trainer_s, max(self.engines_s, self.kv_s, self.slots_s), self.sandboxes_s, self.gate_s)
        return sum(part**3 for part in parts) ** (1 / 3)


def _prefill_s(cost: EngineCost, m: Means) -> float:
    """Mean of a trajectory: its prompt once a group, every observation once."""
    new = m.context - m.generated - m.prompt
    matrix = cost.token_s * (new.sum() + m.prompt[:, 0].sum()) / m.generated.size
    prompts = cost.attention_s * (m.prompt[:, 0] ** 2).sum() / m.generated.size
    # Attention of the observations: their share of the context's growth.
    growth = np.maximum(m.context - m.prompt, 1.0)
    grown = cost.attention_s * ((m.context**2 - m.prompt**2) * new / growth).mean()
    return float(matrix + prompts + grown)


def _life_s(cost: EngineCost, m: Means) -> np.ndarray:
    """Of a trajectory with a worker to itself, [groups, K]; its prompt's prefill may be a sibling's."""
    prefill = cost.token_s * (m.context - m.generated - m.prompt)
    return m.waits_s + prefill + m.generated * (cost.base_s + cost.request_s) + cost.kv_token_s * m.attended


def kv_batch(cost: EngineCost, m: Means) -> float:
    """Trajectories whose contexts fit the KV memory of a worker together, a group's prompt counted once."""
    own = m.decode_context - float(m.prompt.mean()) * (1 - 1 / m.generated.shape[1])
    return max(1.0, cost.kv_tokens / max(own, 1.0))


def bounds(config: PlanConfig, candidate: Candidate, m: Means) -> Bounds:
    """Of `candidate`, in O(1) simulations: none."""
    sim: SimConfig = sim_config(config, candidate, steps=1, seed=0)
    cost, train = engine_cost(sim.model, sim.engine), train_cost(sim)
    batch, size = sim.group.batch, sim.group.size
    number = batch * size
    in_flight = int(candidate.async_factor * batch + 1e-9)
    after_s = train.optimizer_s + train.sync_s
    sequence_s = float((train.token_s * m.context + train.attention_s * m.context**2).mean())
    open_at_once = in_flight * size / candidate.workers
    if candidate.sandboxes:
        open_at_once = min(open_at_once, candidate.sandboxes / candidate.workers)

    def engines(most: float) -> float:
        decode = m.generated.mean() * (cost.base_s / max(1.0, most) + cost.request_s)
        each = decode + cost.kv_token_s * m.attended.mean() + _prefill_s(cost, m)
        return float(number * each / candidate.workers)

    life = _life_s(cost, m)
    sandboxes_s = number * float(life.mean()) / candidate.sandboxes if candidate.sandboxes else 0.0
    return Bounds(
        trainer_s=number * sequence_s / candidate.replicas + after_s,
        engines_s=engines(open_at_once),
        kv_s=engines(min(open_at_once, kv_batch(cost, m))),
        slots_s=engines(min(open_at_once, candidate.slots)),
        sandboxes_s=sandboxes_s,
        gate_s=batch * (float(life.max(axis=1).mean()) + after_s) / in_flight,
        tokens=number * float(m.generated.mean()),
    )


def starting_slots(config: PlanConfig, tp: int, m: Means) -> int:
    """Of `search.slots` the nearest that is not below what KV memory holds: more thrash where nothing guards them."""
    engine = replace(config.sim.engine, tp=tp, hbm_gb=config.cluster.hbm_gb, l2="none")
    fitting = kv_batch(engine_cost(config.sim.model, engine), m)
    above = [slots for slots in sorted(config.search.slots) if slots >= fitting]
    return above[0] if above else max(config.search.slots)
