"""Each algorithm through the real model and the gradient stream, against transformers and formulas token by token."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from envclient.base.errors import InvariantError
from megatron_venus.config import CorrectionConfig, KlConfig, LossConfig, OptimizerConfig
from megatron_venus.reference import FrozenReference
from rollout.policy.advantages import AdvantageRule
from rollout.types import TrainGroup
from tests.numerics import kit
from tests.numerics.loss_reference import Member, loss_of


@dataclass(kw_only=True)
class Setting:
    loss: LossConfig
    rule: AdvantageRule = field(default_factory=AdvantageRule)


BATCH, GROUP_BATCH = (AdvantageRule(estimator=name, normalise_std=False) for name in ("batch", "group_batch"))
TOKEN_SEQ = "seq-mean-token-mean"
SETTINGS = {
    "grpo, bypass, dual clip": Setting(loss=LossConfig(bypass=True, dual_clip=1.5, aggregation=TOKEN_SEQ)),
    "dr_grpo": Setting(
        loss=LossConfig(algorithm="dr_grpo", bypass=True, aggregation="seq-mean-token-sum-norm", norm_tokens=50)
    ),
    "dapo, bypass, overlong": Setting(
        loss=LossConfig(algorithm="dapo", bypass=True),
        rule=AdvantageRule(overlong_tokens=14, overlong_buffer=8, overlong_factor=0.5),
    ),
    "gspo, bypass": Setting(
        loss=LossConfig(algorithm="gspo", bypass=True, aggregation=TOKEN_SEQ, clip_low=0.03, clip_high=0.03)
    ),
    "cispo, bypass, k3": Setting(
        loss=LossConfig(algorithm="cispo", bypass=True, correction=CorrectionConfig(reject="k3", reject_k3=0.04))
    ),
    "tis, KL in the loss": Setting(
        loss=LossConfig(
            correction=CorrectionConfig(weight="tis"),
            kl=KlConfig(place="loss", coefficient=0.2),
            aggregation="seq-mean-token-sum",
        )
    ),
    "KL in the reward": Setting(loss=LossConfig(kl=KlConfig(place="reward", coefficient=0.1, estimator="k1"))),
    "KL in the reward, overlong, bypass": Setting(
        loss=LossConfig(bypass=True, kl=KlConfig(place="reward", coefficient=0.1)),
        rule=AdvantageRule(overlong_tokens=14, overlong_buffer=8, overlong_factor=0.5),
    ),
    "reinforce_plus_plus": Setting(loss=LossConfig(algorithm="reinforce_plus_plus"), rule=BATCH),
    "reinforce_plus_plus, KL in the reward": Setting(
        loss=LossConfig(algorithm="reinforce_plus_plus", kl=KlConfig(place="reward", coefficient=0.1)), rule=BATCH
    ),
    "reinforce_plus_plus, baseline": Setting(loss=LossConfig(algorithm="reinforce_plus_plus"), rule=GROUP_BATCH),
}


def make_groups(count: int, rule: AdvantageRule, model: Any, *, seed: int = 0) -> list[TrainGroup]:
    """Groups whose log μ lies around the model's own log π, with the advantages that the coordinator would give."""
    generator = torch.Generator().manual_seed(seed)
    groups = []
    for group in kit.make_groups(count, seed=seed):
        rewards = torch.randint(0, 3, (len(group.sequences),), generator=generator).double().tolist()
        lengths = [sum(sequence.loss_mask) for sequence in group.sequences]
        advantages = rule.of_group(rule.shaped(rewards, lengths))
        sequences = []
        for sequence, reward, advantage in zip(group.sequences, rewards, advantages, strict=True):
            with torch.no_grad():
                log_pi = kit.reference_log_probs(model, sequence)
            values = iter((log_pi + 0.3 * torch.randn(len(log_pi), generator=generator)).tolist())
            logprobs = [next(values) if bit else 0.0 for bit in sequence.loss_mask]
            changes = {"logprobs": logprobs, "reward": reward, "advantage": advantage}
            sequences.append(msgspec.structs.replace(sequence, **changes))
        groups.append(msgspec.structs.replace(group, sequences=sequences))
    return groups


def reference_batch(model: Any, ref: Any, groups: Sequence[TrainGroup], setting: Setting, old: Any) -> list[Member]:
    """Every sequence with gradient from `model`; advantages by the formulas, from the rewards."""
    loss, rule = setting.loss, setting.rule
    members: list[Member] = []
    for group in groups:
        own = []
        for sequence in group.sequences:
            with torch.no_grad():
                log_ref = kit.reference_log_probs(ref, sequence) if loss.kl.place != "none" else None
                log_old = kit.reference_log_probs(old, sequence) if old is not None else None
            mu = torch.tensor([p for p, bit in zip(sequence.logprobs, sequence.loss_mask, strict=True) if bit])
            log_pi = kit.reference_log_probs(model, sequence)
            zeros = torch.zeros(len(mu), dtype=torch.float64)
            own.append(Member(log_pi=log_pi, log_mu=mu, log_old=log_old, log_ref=log_ref, advantages=zeros))
        penalties = []
        for member in own:
            start = member.log_mu if loss.bypass else member.log_pi.detach()
            d = torch.zeros(len(start)) if member.log_ref is None else member.log_ref - start
            estimate = -d if loss.kl.estimator == "k1" else d.exp() - 1 - d
            penalties.append(loss.kl.coefficient * estimate if loss.kl.place == "reward" else 0 * estimate)
        scores = []
        for sequence in group.sequences:
            tokens, limit, buffer = sum(sequence.loss_mask), rule.overlong_tokens, rule.overlong_buffer
            over = min(0.0, max(-1.0, (limit - buffer - tokens) / buffer)) if limit else 0.0
            scores.append(sequence.reward + rule.overlong_factor * over)
        if rule.estimator == "group":
            scores = [score - penalty.sum().item() for score, penalty in zip(scores, penalties, strict=True)]
        mean = sum(scores) / len(scores)
        deviation = math.sqrt(sum((score - mean) ** 2 for score in scores) / (len(scores) - 1))
        for member, score, penalty in zip(own, scores, penalties, strict=True):
            if rule.estimator == "group":
                member.advantages += (score - mean) / (deviation + 1e-6) if deviation > 1e-9 else 0.0
            else:
                member.advantages += score - (mean if rule.estimator == "group_batch" else 0.0)
                member.advantages -= torch.stack([penalty[place:].sum() for place in range(len(penalty))])
        members += own
    if rule.estimator != "group":
        everything = torch.cat([member.advantages for member in members])
        for member in members:
            member.advantages = (member.advantages - everything.mean()) / (everything.std() + 1e-6)
    return members


@pytest.fixture(scope="module")
def folders(tied_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The policy, and another model as its reference."""
    return tied_model, kit.make_model(tmp_path_factory.mktemp("reference"), seed=5)


@pytest.mark.parametrize("name", SETTINGS)
def test_gradient(name: str, folders: tuple[Path, Path]) -> None:
    from megatron_venus.hf_folder import read_weights

    setting = SETTINGS[name]
    model, ref = (kit.reference_model(folder) for folder in folders)
    groups = make_groups(4, setting.rule, model)
    actor = kit.make_actor(folders[1])
    reference = FrozenReference(actor.chunks) if setting.loss.kl.place != "none" else None
    actor.load_weights(read_weights(folders[0]), "of the test")
    options = {"loss": setting.loss, "advantage": setting.rule, "reference": reference, "micro_batch_tokens": 60}
    stream = kit.make_stream(actor, **options)
    gradient = kit.capture_gradient(actor)
    shuffled = list(groups)
    random.Random(len(name)).shuffle(shuffled)
    before = [param.detach().clone() for param in actor.chunks[0].parameters()]
    for group in shuffled:
        stream.add(group)
    assert all(torch.equal(param, old) for param, old in zip(actor.chunks[0].parameters(), before, strict=True))
    counts = kit.counts_of(groups)
    metrics = stream.finish(1, counts).metrics

    members = reference_batch(model, ref, groups, setting, None)
    loss = loss_of(setting.loss, members, tokens=counts.tokens, sequences=counts.sequences)
    loss.backward()
    kit.assert_gradient(gradient, model)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
    # What binds by its kind did: without that the case would show nothing.
    assert (metrics["clip_frac"] > 0) == setting.loss.bypass
    if setting.loss.correction.reject != "none":
        assert 0 < metrics["correction/rejected"] < 1
    if reference is not None:
        assert metrics["kl_ref"] != 0.0


def updates(actor: Any) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """(weights, gradient) of each update from now on."""
    gradient, seen = kit.capture_gradient(actor), []
    capture = actor.gradient_is_finite

    def both() -> bool:
        finite: bool = capture()
        seen.append(({name: tensor.clone() for name, tensor in actor.hf_tensors()}, dict(gradient)))
        return finite

    actor.gradient_is_finite = both
    return seen


@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "cispo"])
def test_several_updates(algorithm: str, tied_model: Path) -> None:
    """Each update is on its part of the groups; π_old stays the policy before the first, so the second one clips."""
    model = kit.reference_model(tied_model)
    setting = Setting(
        loss=LossConfig(algorithm=algorithm, updates_per_batch=2, clip_low=0.02, clip_high=0.02, aggregation=TOKEN_SEQ)
    )
    groups = make_groups(5, setting.rule, model)
    optimizer = OptimizerConfig(lr=3e-3)
    actor = kit.make_actor(tied_model, optimizer)
    stream = kit.make_stream(actor, loss=setting.loss, optimizer=optimizer)
    seen = updates(actor)
    for group in [groups[3], groups[1], groups[4], groups[0], groups[2]]:
        stream.add(group)
    metrics = stream.finish(1, kit.counts_of(groups)).metrics
    assert metrics["updates"] == 2 and metrics["clip_frac"] > 0
    clipped = 0.0
    for (weights, gradient), part in zip(seen, (groups[:3], groups[3:]), strict=True):
        learner = kit.reference_model(tied_model)
        learner.load_state_dict(weights, strict=False)
        counts = kit.counts_of(part)
        members = reference_batch(learner, None, part, setting, model)
        loss_of(setting.loss, members, tokens=counts.tokens, sequences=counts.sequences).backward()
        kit.assert_gradient(gradient, learner)
        ratios = torch.cat([(m.log_pi.detach() - m.log_old).exp() for m in members if m.log_old is not None])
        clipped = float(((ratios - 1).abs() > 0.02).float().mean())
    assert clipped > 0.1


def test_two_replicas(tied_model: Path, tmp_path: Path) -> None:
    """Normalised over the batch and divided into updates, a batch gives the same gradients however it is dealt."""
    model = kit.reference_model(tied_model)
    loss = LossConfig(algorithm="reinforce_plus_plus", aggregation="seq-mean-token-sum")
    groups = make_groups(5, BATCH, model)

    def case(first: list[int], updates: int) -> kit.Case:
        share = {"folder": str(tied_model), "groups": groups, "first": first, "micro_batch_tokens": 64}
        return kit.Case(**share, loss=replace(loss, updates_per_batch=updates), advantage=BATCH)

    results = kit.torchrun(2, [case([3, 0, 4], 2), case([1], 2), case([], 2), case([3, 0], 1)], tmp_path)
    for result in results[1:3]:
        assert result["metrics"]["loss"] == pytest.approx(results[0]["metrics"]["loss"], abs=1e-6)
        for name, tensor in result["gradient"].items():
            # Of the second update, from weights that Adam moved by nearly the first gradient's sign.
            assert kit.relative_error(tensor, results[0]["gradient"][name]) <= 2e-5, name
    counts = kit.counts_of(groups)
    members = reference_batch(model, None, groups, Setting(loss=loss, rule=BATCH), None)
    loss_of(loss, members, tokens=counts.tokens, sequences=counts.sequences).backward()
    kit.assert_gradient(results[3]["gradient"], model)


def test_fewer_groups_than_updates(tied_model: Path) -> None:
    """An update without a group is none: Adam would move by its momentum alone."""
    model = kit.reference_model(tied_model)
    loss = LossConfig(updates_per_batch=4)
    groups = make_groups(2, AdvantageRule(), model)
    stream = kit.make_stream(kit.make_actor(tied_model), loss=loss)
    for group in groups:
        stream.add(group)
    assert stream.finish(1, kit.counts_of(groups)).metrics["updates"] == 2
    # Nothing is left of the batch.
    stream.add(groups[0])
    assert stream.finish(2, kit.counts_of(groups[:1])).metrics["updates"] == 1


def test_reference_is_asked_for_where_it_is_needed(tied_model: Path) -> None:
    actor = kit.make_actor(tied_model)
    with pytest.raises(InvariantError, match=r"kl\.place=loss"):
        kit.make_stream(actor, loss=LossConfig(kl=KlConfig(place="loss")))
