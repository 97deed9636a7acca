"""jrl: a reinforcement-learning engine in JAX. Start at `python -m jrl.train --help`, or at `jrl.algos.ppo`."""
