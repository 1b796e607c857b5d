"""What a run will need of its machines, computed before anything starts: places, parameters, activations, memory.

Pure arithmetic over the run's config and the model's `config.json`; no torch, no process group. Called by `preflight`
(refusals) and by the dry run (the text a person reads).
"""

from megatron_venus.plan.engine import check_engine
from megatron_venus.plan.memory import GB, MemoryPlan, Target, memory_plan
from megatron_venus.plan.places import places
from megatron_venus.plan.report import plan_text
from megatron_venus.plan.search import check_fits, smallest_change

__all__ = [
    "GB",
    "MemoryPlan",
    "Target",
    "check_engine",
    "check_fits",
    "memory_plan",
    "places",
    "plan_text",
    "smallest_change",
]
