"""Filling rollouts: inside a program (`unroll`), from the host (`collect`), and evaluation."""
