"""How much a trajectory has still to generate, asked of a small language model while its tool runs (paper §4.1).

The way of a datum: a run's coordinator writes finished episodes down (`episodes`), `collect` joins them with the run's
events into what was known after each turn (`data`), `train` fits a small Qwen3 with a regression head to it (`model`),
`evaluate` compares it on held-out tasks with simpler estimates, and `serve` answers the workers of a run and trains
itself anew at checkpoints (`refresh`). The answer is an event of the dispatcher; without it only the order of turns
changes.
"""
