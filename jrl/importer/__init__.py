"""Policies that Stable-Baselines3 has trained, as runs of jrl. Nothing of their files is executed: no torch, no pickle.

`torch_file` reads arrays that torch has saved, `vec_normalize` reads running statistics, `sb3` turns both into a config
and the State of an algorithm. `__main__` is the command `jrl import`.
"""
