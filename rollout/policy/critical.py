"""PURE: which groups are critical (paper §4.1): the k that are expected to complete the next batch soonest.

Kept incrementally: a change of one group's F_g costs O(log n). k changes as groups become ready or are taken.
"""
