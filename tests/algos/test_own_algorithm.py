"""An algorithm of one's own with replay: examples/own_dqn.py, and what is told where the contract is broken."""

from pathlib import Path

import fakes
import jax
import numpy as np
import pytest

from jrl import algos, config, envs
from jrl.algos import dqn
from jrl.networks import NetworkConfig
from jrl.run import build_collect
from jrl.types import Discrete, InputError

ROOT = Path(__file__).parents[2]


def test_the_algorithm_of_your_own_with_replay_is_dqn():
    """examples/own_dqn.py: its gradient step is that of jrl's DQN with the squared error, from the same weights."""
    own = algos.get("examples.own_dqn")
    spec = fakes.spec(Discrete(3))
    mine = own.make(own.Config(), spec)
    ours = dqn.make(dqn.Config(lr=1e-3, tau=0.01, target_update_every=1, loss="mse"), spec, NetworkConfig())
    state, other = jax.jit(mine.init)(jax.random.key(0)), jax.eval_shape(ours.init, jax.random.key(1))
    batch = fakes.batch(mine, spec, mine.actor(state), N=16)
    like = jax.tree.structure(other.params)
    params = jax.tree.unflatten(like, jax.tree.leaves(state.params))
    other = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), other).replace(params=params, target_params=params)
    state, aux = jax.jit(mine.update)(state, batch, jax.random.key(2))
    other, expected = jax.jit(ours.update)(other, batch, jax.random.key(2))
    fakes.assert_close(jax.tree.leaves(state.params), jax.tree.leaves(other.params))
    fakes.assert_close(jax.tree.leaves(state.target_params), jax.tree.leaves(other.target_params))
    fakes.assert_close(aux.priority, expected.priority)


def test_what_an_algorithm_of_your_own_with_replay_has_to_have(tmp_path, monkeypatch):
    """Without `ingest`, with other data than its Config says, without an Algo: one error that names it."""
    monkeypatch.syspath_prepend(tmp_path)
    source = (ROOT / "examples" / "own_dqn.py").read_text()
    for name, old, new, message in (
        ("without_ingest", "ingest=agents.ingest, ", "", "ingest: expected a function"),
        (
            "of_rollouts",
            "ingest=agents.ingest, ",
            "data=__import__('jrl').fields.data.Fresh(), ",
            "data is Replay, as Config.learns_from says, got Fresh",
        ),
        ("of_nothing", "return agents.algo(cfg, agent,", "return dict(", "make: expected a jrl.types.Algo, got dict"),
    ):
        assert old in source
        (tmp_path / f"{name}.py").write_text(source.replace(old, new))
        given = ["env.backend=jax", "env.num_envs=2", "network.hidden=[4]", "run.log=[]", "replay.learning_starts=8"]
        cfg = config.load(None, given, algo=name, env="CartPole-v1", stop=["env_steps=64"])
        with pytest.raises(InputError, match=message):
            build_collect.algorithm(cfg, envs.make("CartPole-v1", backend="jax", num_envs=2).spec)
