"""Plumbing shared by every package: errors, wire format and auth, files, processes, ports, configs.

Nothing here knows about reinforcement learning. Every package may import it; it imports none of them.
"""
