"""The planner: which split of a cluster gives the most trained tokens per hour, what binds it, what the next euro buys.

`config` says what there is and what may be tried, `space` which candidates are feasible, `bounds` what no candidate can
exceed (closed form), `measure` simulates, `search` halves the field until one candidate is left and trims it, `gains`
asks what more of each resource would give, `report` and `page` tell it. `python -m rollout.sim.plan --help`.
"""
