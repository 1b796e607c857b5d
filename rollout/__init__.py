"""Generation and its control plane: coordinator, dispatcher and policies, rollout workers."""
