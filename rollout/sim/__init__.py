"""The cluster simulator: virtual time around the same dispatcher and slot policies that a live run uses.

A run follows the way of a datum: `workload` says what each trajectory will do, `cluster` feeds events to the dispatcher
and obeys its commands, `worker` plays trajectories on an `engine` (KV memory in `kv`, seconds in `cost`), `trainer`
consumes the groups, and `metrics` sums up. `python -m rollout.sim --help` is the way in.
"""
