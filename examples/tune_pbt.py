"""Population based training (arXiv:1711.09846) of a learning rate, beside the same population without it.

    python examples/tune_pbt.py [ITERATIONS]

Three runs begin with learning rates that are far too small. Every third iteration the worst takes over the weights of
the best, and its learning rate, changed. Prints the return of the best run with and without.
"""

import random
import sys
from typing import Any

from jrl.api import tune

RATES = [1e-6, 3e-6, 1e-5]


def population(iterations: int, scheduler: Any, storage_path: str | None) -> Any:
    tuner = tune.Tuner(
        tune.with_resources("PPO", {"cpu": 0.5}),  # all three at a time, on two cores
        param_space={
            "env": "CartPole-v1",
            "backend": "jax",
            "num_envs": 16,
            "rollout_fragment_length": 64,
            "lr": tune.grid_search(RATES),
            "min_sample_timesteps_per_iteration": 8192,
        },
        tune_config=tune.TuneConfig(
            scheduler=scheduler,
            reuse_actors=True,  # else each exchange would start a process
        ),
        run_config=tune.RunConfig(storage_path=storage_path, stop={"training_iteration": iterations}, verbose=1),
    )
    return tuner.fit()


def main(iterations: int = 15, storage_path: str | None = None) -> dict[str, float]:
    random.seed(0)  # of the scheduler
    pbt = tune.schedulers.PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=3,
        metric="episode_return_mean",
        mode="max",
        hyperparam_mutations={"lr": tune.loguniform(1e-6, 1e-2)},
        perturbation_factors=(8.0, 3.0),
        resample_probability=0.0,
        synch=True,
    )
    found = {}
    for name, scheduler in {"fixed": None, "population": pbt}.items():
        best = population(iterations, scheduler, storage_path).get_best_result("episode_return_mean", "max")
        found[name] = best.metrics["episode_return_mean"]
        found[f"{name}, lr"] = best.config["lr"]
    print(", ".join(f"{name}: {value:.4g}" for name, value in found.items()))
    return found


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
