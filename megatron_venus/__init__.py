"""Training and the entry points: the Megatron-core actor, weight sync, checkpoints, launch."""
