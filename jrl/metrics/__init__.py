"""Metrics of a run: episode statistics, stage timers, result rows and loggers, learning curves.

A row is a flat mapping of names to numbers: env_steps updates iteration time_s perf/steps_per_s episode/return
episode/length episode/count loss/policy policy/entropy time/env ... Import the submodules; this file stays empty
because `episodes` needs jax and the others do not.
"""
