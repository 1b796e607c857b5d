"""Checkpoints on disk, without a GPU and without the model in memory: Hugging Face's and Megatron's distributed ones.

`python -m ckpt_tools.from_hf | to_hf | inspect | verify | reshard --help`. Every tool reads and writes a block of rows
at a time, checks its input before it writes, and leaves its output complete or absent. Imports of `megatron_venus` only
what is pure: the weight map, the Hugging Face folder and the manifest; never Megatron itself: its format (`torch_dist`)
is torch's distributed checkpoint with two small files beside it.
"""
