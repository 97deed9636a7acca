"""Policies that Stable-Baselines3 and rsl_rl have trained, as runs of jrl, without torch; files are never executed.

`torch_file` reads arrays that torch has saved, `vec_normalize` reads running statistics. `sb3` and `rsl_rl` turn them
into a config and the State of an algorithm. `__main__` is the command `jrl import`.
"""
