"""What holds for every algorithm whatever it observes: dictionaries, what the critic alone reads, action masks, memory,
and these together."""

import dataclasses

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES
from fakes import assert_close, assert_same, differ

from jrl import algos
from jrl.algos.exploration import EpsilonGreedy
from jrl.fields import hyper
from jrl.learn import parallel
from jrl.networks import NetworkConfig
from jrl.types import NEXT_ACTION, Box, Dict, Discrete, EnvSpec, MultiBinary, Rollout, SequenceBatch

KEY = jax.random.key(4)
NAMES = algos.names()
REPLAY = tuple(name for name in NAMES if not fakes.make(name).on_policy)
SINGLE = tuple(name for name in REPLAY if isinstance(fakes.spec(name=name).observation, Box))
BOX = Box((2,), low=-1.0, high=1.0)
NESTED = Dict((("motion", Box((3,))), ("at", Box((2,)))))
MASKED = Dict((("action_mask", MultiBinary((3,))), ("x", Box((3,)))))
PRIVILEGED = Dict((("x", Box((3,))), ("state", Box((2,)))))  # the critic alone reads the state
LADDERS = tuple(name for name in NAMES if isinstance(fakes.config(name).exploration, EpsilonGreedy))
PLAIN = NetworkConfig(hidden=(8,))
CORES = {"gru": hyper.Gru(size=6), "lstm": hyper.Lstm(size=6)}
memory = lambda core, **more: NetworkConfig(hidden=(8,), core=CORES[core], max_seq_len=4, **more)
# what may go wrong with one of them alone
OPTIONS = {
    "dqn": (
        {"noisy": True, "dueling": True, "head": "c51", "double": True},
        {"munchausen": True, "head": "qr"},
        {"value_rescaling": True, "normalize_obs": True, "normalize_reward": True},
    ),
    "sac": ({"policy_every": 2, "max_grad_norm": 1.0, "normalize_obs": True}, {"num_critics": 3, "target_critics": 2}),
    "td3": ({"policy_every": 1, "actor_bc": 0.5, "critic_bc": 0.2},),
    "marwil": ({"normalize_obs": True, "normalize_reward": True}, {"weight": "softmax"}, {"weight": "binary"}),
}


def spec(name, observation, num_envs=fakes.COLUMNS):
    if fakes.in_teams(name):
        return fakes.spec(observation=observation, num_envs=num_envs, name=name)
    action = Discrete(3) if fakes.acts_in(name, Discrete) else BOX
    return EnvSpec(fakes.observes(name, observation), action, num_envs)


def reads(name):
    """What of an observation with a state is the critic's alone, where there is one."""
    return {"value_inputs": ("state",)} if algos.get_config_class(name).has_critic else {}


def setting(name, env_spec, network, **options):
    """(algo, state, data): a state of an odd number of updates, away from its start."""
    algo = fakes.make(name, env_spec, network, **options)
    state = fakes.perturbed(fakes.init_state(algo)).replace(updates=jnp.uint32(1))
    burn_in = 0 if fakes.plays_for_a_return(name) else 2
    return algo, state, fakes.drawn(algo, env_spec, algo.actor(state), burn_in=burn_in)


def spoiled(data):
    """The same with other contents of void rows, whatever they may be."""
    data = jax.device_get(data)
    if isinstance(data, Rollout):
        void = ~data.mask
        extras = {k: np.where(void, np.nan, x) if k == "log_prob" else x for k, x in data.extras.items()}
        other = data.action + np.float32(1) if data.action.ndim > 2 else 2 - data.action
        action = np.where(void.reshape(*void.shape, *[1] * (data.action.ndim - 2)), other, data.action)
        return void, data.replace(reward=np.where(void, np.nan, data.reward), action=action, extras=extras)
    void = data.weight == 0
    fill = lambda x, value: np.where(void.reshape(*void.shape, *[1] * (x.ndim - void.ndim)), value, x)
    changes = {"reward": fill(data.reward, np.nan), "discount": fill(data.discount, np.inf)}
    changes["action"] = fill(data.action, 2**30 if data.action.dtype == np.int32 else np.nan)
    known = data.extras[NEXT_ACTION]
    unknown = ~known["valid"].reshape(*known["valid"].shape, *[1] * (data.action.ndim - void.ndim))
    after = np.where(unknown, changes["action"].max(), fill(known["action"], changes["action"].max()))
    changes["extras"] = {**data.extras, NEXT_ACTION: {**known, "action": after}}
    if isinstance(data, SequenceBatch):
        # observations that no row before led to; the others are what a time limit is bootstrapped from
        reset = data.window.reset
        unread = reset & np.concatenate([np.ones_like(reset[:, :1]), reset[:, :-1]], 1)
        behind = lambda x: unread.reshape(*unread.shape, *[1] * (x.ndim - unread.ndim))
        hide = lambda x: np.where(behind(x), np.nan, x) if x.dtype == np.float32 else x
        changes["window"] = data.window.replace(obs=jax.tree.map(hide, data.window.obs))
        changes["ahead"] = fill(data.ahead, 2**30)
    return void, data.replace(**changes)


@pytest.mark.parametrize(
    ("name", "observation", "core", "options"),
    [
        pytest.param(
            name, observation, core, options, marks=[] if (name, core) == ("td3", "gru") else [pytest.mark.slow]
        )
        for name in NAMES
        for observation, core in (("masked", None), ("privileged", "gru"), ("masked", "lstm"))
        if observation != "masked" or fakes.acts_in(name, Discrete) or fakes.in_teams(name)
        for options in (OPTIONS.get(name, ({},)) if core else ({},))
    ],
    ids=str,
)
def test_what_stands_on_void_rows_changes_nothing(name, observation, core, options):
    """And what stands on the others reaches every part: towers and cores of policy and critics."""
    seen, more = (MASKED, {}) if observation == "masked" else (PRIVILEGED, reads(name))
    network = memory(core, **more) if core else PLAIN
    algo, state, data = setting(name, spec(name, seen), network, **options)
    if not (algo.on_policy or algo.sequences):
        data = data.replace(weight=data.weight.at[:3].set(0.0))
    void, other = spoiled(data)
    assert 0 < int(void.sum()) < void.size
    update = jax.jit(algo.update)
    after, aux = update(state, data, KEY)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((after, aux)))
    assert_same((after, aux), update(state, other, KEY))
    assert differ(state.params, after.params)
    old, new = (jax.tree_util.tree_leaves_with_path(x.params) for x in (state, after))
    for (path, before), (_, now) in zip(old, new, strict=True):
        if "core" in (name := jax.tree_util.keystr(path)) and "kernel" in name:
            assert differ(before, now), name


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_four_devices_learn_with_memory_what_one_learns(name):
    """Of a dictionary, a part of which is the critic's alone where there is one."""
    env_spec, network = spec(name, PRIVILEGED, num_envs=8), memory("lstm", **reads(name))
    algo, state, data = setting(name, env_spec, network)
    alone, _ = jax.jit(algo.update)(state, data, KEY)
    mapped = fakes.make(name, env_spec, network, axis_name=parallel.AXIS)
    update = jax.vmap(lambda state, data: mapped.update(state, data, KEY)[0], axis_name=parallel.AXIS)
    together = jax.jit(update)(jax.tree.map(lambda x: jnp.stack([x] * 4), state), fakes.per_device(data, 4))
    assert differ(alone.params, state.params)
    for device in range(4):
        assert_close(fakes.part(together.params, device), alone.params, atol=2e-5)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in NAMES])
def test_a_dictionary_of_vectors_is_their_concatenation(name):
    """In the order of the names; the parameters are the same."""
    plain, nested = spec(name, Box((5,)), 8), spec(name, NESTED, 8)
    algo, other = (fakes.make(name, s) for s in (plain, nested))
    state = fakes.perturbed(fakes.init_state(algo))
    assert jax.tree.structure(state) == jax.tree.structure(jax.eval_shape(other.init, KEY))
    data = fakes.data(algo, plain, algo.actor(state))
    halves = lambda x: {"at": x[..., :2], "motion": x[..., 2:]}

    def split(x):
        if fakes.in_teams(name):
            return {**x, "agents": halves(x["agents"])}
        return halves(x) if not isinstance(x, dict) else {**halves(x["obs"]), "prev_reward": x["prev_reward"]}

    names = ("obs", "last_obs") if algo.on_policy else ("obs", "next_obs")
    parts = data.replace(**{name: split(getattr(data, name)) for name in names})
    assert_close(jax.jit(other.update)(state, parts, KEY), jax.jit(algo.update)(state, data, KEY), atol=1e-5)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "sac" else [pytest.mark.slow]) for n in SINGLE])
def test_running_statistics_are_of_all_rows_that_came(name):
    """What acts and learns sees (obs - mean) / deviation of them; rewards are divided by the return's deviation."""
    env_spec, options = fakes.spec(name=name), {"adam_eps": 1.0, "gamma": 0.9}
    algo = fakes.make(name, env_spec, **options, normalize_obs=True, normalize_reward=True)
    plain = fakes.make(name, env_spec, **options)
    assert algo.running_return_gamma == 0.9 and plain.running_return_gamma is None
    state, rows, returns = fakes.perturbed(fakes.init_state(algo)), [], []
    for seed in range(2):
        rollout = fakes.rollout(algo, env_spec, algo.actor(state), seed=seed)
        state = jax.jit(algo.ingest)(state, rollout)
        mask = np.asarray(rollout.mask)
        rows.append(np.asarray(rollout.obs, np.float64)[mask])
        returns.append(np.asarray(rollout.extras["running_return"], np.float64)[mask])
    rows, returns = np.concatenate(rows), np.concatenate(returns)
    np.testing.assert_allclose(state.obs_stats.mean, rows.mean(0), rtol=1e-4, atol=1e-5)
    batch = fakes.batch(algo, env_spec, algo.actor(state), N=32)
    see = lambda x: jnp.asarray((np.asarray(x, np.float64) - rows.mean(0)) / rows.std(0), jnp.float32)
    without = dataclasses.replace(state, obs_stats=(), return_stats=())

    def act(algo, state, obs):
        run = jax.jit(algo.act, static_argnames="explore")
        return run(algo.actor(state), obs, algo.carry(32), KEY, explore=False).action

    np.testing.assert_allclose(act(algo, state, batch.obs), act(plain, without, see(batch.obs)), rtol=1e-3, atol=1e-4)
    seen = batch.replace(
        obs=see(batch.obs), next_obs=see(batch.next_obs), reward=batch.reward / np.float32(returns.std())
    )
    got, aux = jax.jit(algo.update)(state, batch, KEY)
    want, want_aux = jax.jit(plain.update)(without, seen, KEY)
    assert_close(got.params, want.params, atol=1e-4, rtol=1e-3)
    assert_close(aux.metrics, want_aux.metrics, atol=1e-3, rtol=1e-3)
    if aux.priority is not None:
        np.testing.assert_allclose(aux.priority, want_aux.priority, rtol=1e-2, atol=1e-3)
    assert_same((got.obs_stats, got.return_stats), (state.obs_stats, state.return_stats))


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if CASES[n].like else []) for n in NAMES])
def test_the_step_size_follows_the_environment_steps(name):
    """Piecewise linear, and 0 at first, when no parameter moves; also where there are more steps than int32 counts."""
    env_spec, lr = fakes.spec(name=name), ((0, 0.0), (50, 0.0), (150, 0.1))
    algo = fakes.make(name, env_spec, lr=lr)
    state, update = fakes.perturbed(fakes.init_state(algo)), jax.jit(algo.update)
    data = fakes.data(algo, env_spec, algo.actor(state))
    for steps, want in ((0, 0.0), (100, 0.05), (2**31 + 5, 0.1)):
        after, aux = update(state.replace(env_steps=jnp.uint32(steps)), data, KEY)
        np.testing.assert_allclose(aux.metrics["train/lr"], want, rtol=1e-6)
        # SAC's temperature has a step size of its own
        before, parts = (x.params.get("critic", x.params) for x in (state, after))
        assert differ(before, parts) == (want > 0)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "dqn" else [pytest.mark.slow]) for n in LADDERS])
def test_epsilon_follows_the_environment_steps(name):
    """Of three actions epsilon-greedy takes the best with probability 1 - 2/3 epsilon."""
    env_spec = fakes.spec(name=name)
    algo = fakes.make(name, env_spec, exploration=EpsilonGreedy(epsilon=((0, 1.0), (1000, 0.0))))
    state, act = fakes.perturbed(fakes.init_state(algo)), jax.jit(algo.act, static_argnames="explore")
    obs = fakes.observations(np.random.default_rng(0), env_spec.observation, (5000,))
    obs = jax.tree.map(jnp.asarray, obs)
    best = np.asarray(jax.jit(algo.outputs)(state, obs)["q"]).argmax(-1)

    def share(env_steps, explore=True):
        actor = algo.actor(state.replace(env_steps=jnp.uint32(env_steps)))
        return (np.asarray(act(actor, obs, algo.carry(5000), KEY, explore=explore).action) == best).mean()

    assert share(0, explore=False) == 1.0
    shares = [share(0), share(500), share(1000)]
    atol = 0.1 if name == "iqn" else 0.03  # IQN draws levels at each step
    np.testing.assert_allclose(shares, [1 / 3, 2 / 3, 1.0], atol=atol)
