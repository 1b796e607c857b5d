"""Environments: sandboxes leased to trajectories, and the client that rollout workers call."""
