"""The algorithms as all suites meet them, a row each; a new one gets a row here and nothing else."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from jrl.algos.critic_heads import Critic
from jrl.algos.curiosity import Icm, Rnd
from jrl.algos.exploration import EpsilonGreedy, Gaussian
from jrl.algos.optimizers import AdamW
from jrl.algos.search import Search


class Case(NamedTuple):
    """Hyper-parameters of one algorithm for its tests."""

    loaded: dict[str, Any]  # every option that holds state or reduces over devices, at once
    probe: dict[str, Any]  # learning that is quick and forgets quickly, as the probe environments are
    small: Mapping[str, Any] = MappingProxyType({})  # what keeps its tests quick
    rollouts: int = 1  # times as many to learn a probe, of an algorithm of one gradient step each
    like: str | None = None  # another by whose code it sees, acts and counts: its own tests stand in the slow set


def some_quick(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Values to parametrize a test by: those in `quick` run in `make test`, the others in `make test-all` alone."""
    values = list(values)
    assert all(x in values for x in quick), f"not among the values: {[x for x in quick if x not in values]}"
    return [
        pytest.param(*(x if isinstance(x, tuple) else (x,)), marks=[] if x in quick else [pytest.mark.slow])
        for x in values
    ]


_RATE: dict[str, Any] = {"lr": ((0, 3e-4), (200, 1e-4))}
_STATISTICS = {"normalize_obs": True, "normalize_reward": True}
_CLIPPED_STEPS = {
    **_RATE, **_STATISTICS, "kl_coef": 0.2, "kl_target": 0.01, "target_kl": 0.5, "value_clip_eps": 0.2, "ent_coef": 0.01
}  # fmt: skip
_EPOCHS = {"num_epochs": 2, "num_minibatches": 2}
_PROBE = {"lr": 1e-2, "gamma": 0.9}
_PROBE_EPOCHS = {**_PROBE, "num_epochs": 4, "num_minibatches": 2}
_FEW = {"population": 4, "normalize_obs": False}
_GENERATION: dict[str, Any] = {
    "lr": ((0, 0.2), (200, 0.1)),
    "normalize_obs": True,
    "alive_bonus": 0.2,
    "max_grad_norm": 5.0,
}
_CURIOSITY = {"hidden": (8,), "features": 4, "share": 0.5, "num_minibatches": 2}
_EPSILON = {"exploration": EpsilonGreedy(epsilon=0.2)}

CASES: dict[str, Case] = {
    "ppo": Case(
        {**_CLIPPED_STEPS, "normalize_advantage": "minibatch", "curiosity": Icm(**_CURIOSITY)},
        {**_PROBE_EPOCHS, "adam_eps": 1e-5},
        _EPOCHS,
    ),
    "a2c": Case(
        {
            **_RATE, **_STATISTICS, "gae_lambda": 0.9, "normalize_advantage": True, "microbatch_size": 8,
            "curiosity": Rnd(**_CURIOSITY),
        },
        {**_PROBE, "gae_lambda": 0.95, "ent_coef": 0.0},
        rollouts=6,
        like="ppo",
    ),
    "impala": Case(
        {
            **_RATE, **_STATISTICS, "vtrace_lambda": 0.9, "clip_rho": 1.5, "clip_c": 1.2, "clip_pg_rho": 2.0,
            "max_grad_norm": 0.5,
        },
        {**_PROBE_EPOCHS, "vtrace_lambda": 0.95, "ent_coef": 0.0},
        _EPOCHS,
        like="ppo",
    ),
    "appo": Case({**_CLIPPED_STEPS, "target_update_every": 3, "tau": 0.5}, _PROBE_EPOCHS, _EPOCHS, like="ppo"),
    "trpo": Case(
        {**_RATE, **_STATISTICS, "gae_lambda": 0.9, "cg_steps": 3, "line_search_steps": 4, "max_grad_norm": 0.5},
        {**_PROBE, "num_epochs": 10, "num_minibatches": 2, "target_kl": 0.02},
        {**_EPOCHS, "cg_steps": 4, "line_search_steps": 3},
        like="ppo",
    ),
    "vmpo": Case(
        {**_RATE, **_STATISTICS, "gae_lambda": 0.9, "max_grad_norm": 0.5, "top_share": 0.7},
        {**_PROBE_EPOCHS, "mean_kl": 0.05},
        _EPOCHS,
        like="ppo",
    ),
    # 100 iterations do not find the mean of the probe of a Gaussian to 0.12: that Gaussian is measured on Pendulum
    "reppo": Case(
        {**_RATE, **_STATISTICS, "q_lambda": 0.9, "critic": Critic(kind="hl_gauss", atoms=7, value_range=(-3.0, 3.0))},
        {
            **_PROBE_EPOCHS, "lr": 3e-3, "critic": Critic(kind="hl_gauss", atoms=71, value_range=(-2.0, 12.0)),
            "ent_coef": 1e-3, "target_entropy": 0.1,
        },
        _EPOCHS,
        like="ppo",
    ),
    "dqn": Case(
        {
            **_RATE, "double": True, "dueling": True, "noisy": True, "head": "c51", "num_atoms": 11, "tau": 0.1,
            "target_update_every": 2, "max_grad_norm": 0.5, "conservative": True,
        },
        {**_PROBE, **_EPSILON, "lr": 3e-3, "target_update_every": 16},
        {"loss": "mse"},  # the gradient of a Huber loss does not change with a far reward
    ),
    "iqn": Case(
        {**_RATE, "double": True, "num_quantiles": 5, "tau": 0.1, "target_update_every": 2, "conservative": True},
        {**_PROBE, **_EPSILON, "lr": 3e-3, "target_update_every": 16, "num_quantiles": 8, "width": 32},
        {"num_quantiles": 4, "width": 8},
        like="dqn",
    ),
    "vdn": Case(
        {
            **_RATE, "mixer": "qmix", "mixer_embed": 4, "hypernet_hidden": 8, "tau": 0.1, "target_update_every": 2,
            "max_grad_norm": 0.5,
        },
        {},  # the probe environments are not teams; its exact answers are in test_teams
        like="dqn",
    ),
    "pqn": Case(
        {**_RATE, "normalize_reward": True, "normalize_reward_bound": 5.0, "max_leaf_norm": 1.0},
        {**_PROBE_EPOCHS, **_EPSILON},
        _EPOCHS,
        like="dqn",
    ),
    "sac": Case(
        {
            **_RATE, "num_critics": 3, "target_critics": 2, "policy_every": 2, "max_grad_norm": 0.5, "bc_updates": 2,
            "conservative": True, "cql_actions": 2, "cql_target_gap": 1.0,
            "critic": Critic(kind="quantiles", atoms=5, dropped_atoms=1),
        },
        {"lr": 3e-3, "gamma": 0.9, "tau": 0.05, "learn_ent_coef": False, "ent_coef": 0.02},
    ),
    "td3": Case(
        {
            **_RATE, "num_critics": 3, "policy_every": 1, "max_grad_norm": 0.5, "actor_bc": 0.5, "critic_bc": 0.2,
            "critic": Critic(kind="c51", atoms=7, value_range=(-3.0, 3.0)),
        },
        {"lr": 3e-3, "gamma": 0.9, "tau": 0.05, "exploration": Gaussian(std=0.5)},
        like="sac",
    ),
    "iql": Case(
        {**_RATE, "num_critics": 3, "max_grad_norm": 0.5},
        {"lr": 3e-3, "gamma": 0.9, "tau": 0.05, "expectile": 0.9},
        like="sac",
    ),
    "mpo": Case(
        {**_RATE, "num_critics": 3, "num_samples": 3, "tau": 0.5, "target_update_every": 2, "max_grad_norm": 0.5},
        {"lr": 3e-3, "gamma": 0.9, "target_update_every": 16, "num_samples": 8, "mean_kl": 0.02},
        {"num_samples": 4},
        like="sac",
    ),
    "fql": Case(
        {**_RATE, "num_critics": 3, "target_q": "min", "normalize_q": True, "flow_steps": 3, "max_grad_norm": 0.5},
        {"lr": 3e-3, "gamma": 0.9, "tau": 0.05, "alpha": 1.0, "flow_steps": 5},
        {"flow_steps": 3},
        like="sac",
    ),
    "awr": Case(
        {**_RATE, **_STATISTICS, "ent_coef": 0.01, "max_grad_norm": 0.5, "adv_norm_rate": 0.1},
        {"lr": 3e-3, "gamma": 0.9, "beta": 2.0},
        like="marwil",
    ),
    # the probe environments are learned by acting in them: what these learn is in their own tests
    "bc": Case({**_RATE, **_STATISTICS, "ent_coef": 0.01, "max_grad_norm": 0.5}, {}, like="marwil"),
    "marwil": Case({**_RATE, **_STATISTICS, "weight": "softmax", "ent_coef": 0.01, "max_grad_norm": 0.5}, {}),
    "dt": Case(
        {
            **_RATE, **_STATISTICS, "target_return": 2.0, "return_scale": 4.0, "step_scale": 8.0, "ent_coef": 0.01,
            "max_grad_norm": 0.5,
        },
        {},
        like="marwil",
    ),
    # the student learns what its teacher does, whatever the reward: tests/algos/test_distill.py
    "distill": Case({**_RATE, **_STATISTICS, "student_acts": 0.5, "max_grad_norm": 0.5}, {}, _EPOCHS),
    # populations know no values: what they learn is in tests/algos/test_evolution.py
    "ars": Case({**_GENERATION, "top_directions": 1}, {}, _FEW),
    "es": Case({**_GENERATION, "optimizer": AdamW(weight_decay=0.1)}, {}, _FEW, like="ars"),
    # an image's network has too many parameters for a full matrix
    "cma_es": Case({**_GENERATION, "covariance": "full"}, {}, {**_FEW, "covariance": "diagonal"}, like="ars"),
    # tests/algos/test_search.py has the tests of the searches
    "alphazero": Case(
        {**_RATE, "normalize_obs": True, "gae_lambda": 0.9, "max_grad_norm": 0.5, "microbatch_size": 8},
        {},
        {**_EPOCHS, "search": Search(simulations=2)},
        like="ppo",
    ),
    "muzero": Case(
        {
            **_RATE, "normalize_obs": True, "unroll_steps": 3, "gae_lambda": 0.9, "max_grad_norm": 0.5,
            "search": Search(simulations=3, max_considered_actions=2),
        },
        {},
        {**_EPOCHS, "search": Search(simulations=2), "unroll_steps": 2, "latent": 8, "model_hidden": (8,)},
    ),
    # tests/algos/test_spo.py has the tests of its search
    "spo": Case(
        {**_RATE, "normalize_obs": True, "gae_lambda": 0.9, "temperature": 0.5},
        {},
        {**_EPOCHS, "num_particles": 3},
        like="ppo",
    ),
}  # fmt: skip
