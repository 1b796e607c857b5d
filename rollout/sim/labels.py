"""Labels of simulated policies: a name and keys, as `--policies` takes them."""

from __future__ import annotations


def policy_keys(label: str) -> list[str]:
    """Overrides that a label means: `paper:migration=false:engine.slots=32` is a policy and keys of it.

    A key without a dot is one of `policy`.
    """
    name, *keys = label.split(":")
    return [f"policy.name={name}", *(key if "." in key.split("=")[0] else f"policy.{key}" for key in keys)]
