"""PURE: the coordinator's state machine over the policies of `rollout.policy`.

The live coordinator, the replay and the cluster simulator feed the same `Dispatcher`.
"""

from rollout.dispatcher.config import DispatcherConfig
from rollout.dispatcher.machine import Dispatcher

__all__ = ["Dispatcher", "DispatcherConfig"]
