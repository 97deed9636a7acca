"""What `network.value_inputs` names, the critic reads and the policy does not, in any algorithm that has a critic."""

import dataclasses
import functools
import operator

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import assert_same, differ

from jrl import algos, train
from jrl.algos import agent
from jrl.fields import hyper
from jrl.metrics import loggers
from jrl.networks import NetworkConfig
from jrl.run.store import checkpoint
from jrl.types import Box, Dict, Discrete, EnvSpec, InputError, MultiBinary, Window

KEY = jax.random.key(7)
CRITICS = tuple(name for name in algos.names() if algos.get_config_class(name).has_critic)
GOAL = Dict((("at", Box((2,))), ("kind", Box((1,)))))
OBSERVATION = Dict((("seen", Box((3,))), ("state", Box((2,))), ("goal", GOAL)))
MASKED = Dict((*OBSERVATION.items, ("action_mask", MultiBinary((3,)))))
HIDDEN = ("state", "goal/at")
CORES = {"none": hyper.NoCore(), "gru": hyper.Gru(size=6), "lru": hyper.Lru(size=6, state=4)}
network = lambda core="none", **more: NetworkConfig(hidden=(8,), core=CORES[core], value_inputs=HIDDEN, **more)


def spec(name, observation=OBSERVATION):
    action = Discrete(3) if fakes.acts_in(name, Discrete) else Box((2,), low=-1.0, high=1.0)
    return EnvSpec(fakes.observes(name, observation), action, fakes.COLUMNS)


def changed(obs, by=5.0):
    """The same but for what is hidden."""
    return {**obs, "state": obs["state"] + by, "goal": {**obs["goal"], "at": obs["goal"]["at"] - by}}


def observed(name):
    """With a mask of actions where there can be one."""
    return MASKED if fakes.acts_in(name, Discrete) else OBSERVATION


@functools.cache
def drawn(name, core):
    """(algo, a state away from its start, observations [B, *] of consecutive steps, their rollout)."""
    observation = observed(name)
    algo = fakes.make(name, spec(name, observation), network(core), normalize_obs=True)
    state = fakes.perturbed(fakes.made_up_state(algo))
    made = fakes.rollouts(algo, spec(name, observation), algo.actor(state), count=1)[0]
    state = state.replace(obs_stats=jax.tree.map(lambda x: np.asarray(x) + np.float32(1), state.obs_stats))
    return algo, state, [jax.tree.map(operator.itemgetter(t), jax.device_get(made.obs)) for t in range(4)], made


QUICK = (("ppo", "none"),)
COMBINATIONS = [
    pytest.param(name, core, marks=[] if (name, core) in QUICK else [pytest.mark.slow])
    for name in CRITICS
    for core in CORES
]


@pytest.mark.parametrize(("name", "core"), COMBINATIONS)
def test_acting_does_not_depend_on_it(name, core):
    """Actions, their probabilities and what the policy remembers are the same to the bit, exploring or not."""
    algo, state, steps, _ = drawn(name, core)
    act = jax.jit(algo.act, static_argnames="explore")
    for explore in (True, False):
        carry = other = algo.carry(fakes.COLUMNS)
        for t, obs in enumerate(steps):
            key = jax.random.fold_in(KEY, t)
            out = act(algo.actor(state), obs, carry, key, explore=explore)
            told = act(algo.actor(state), changed(obs), other, key, explore=explore)
            assert_same(out.action, told.action)
            if "log_prob" in out.extras:
                assert_same(out.extras["log_prob"], told.extras["log_prob"])
            carry, other = out.carry, told.carry
        own = agent.split_carry(carry)[0], agent.split_carry(other)[0]
        if name == "fql":  # its memory is that of one network
            assert_same(*own)
        elif core != "none":
            assert_same(*(memory["policy_torso"] for memory in own))
            if "value_torso" in own[0]:
                assert differ(*(memory["value_torso"] for memory in own))


@pytest.mark.parametrize(("name", "core"), COMBINATIONS)
def test_the_value_depends_on_it_and_the_policy_does_not(name, core):
    """By their derivatives in each array of an observation."""
    algo, state, steps, _ = drawn(name, core)
    obs = {k: x for k, x in steps[1].items() if k != "action_mask"}
    whole = {k: np.ones_like(x) for k, x in steps[1].items() if k == "action_mask"}  # all actions are allowed

    def value(obs):
        found = algo.outputs(state, whole | obs)
        return found.get("value", found.get("q")).sum()

    def policy(obs):
        carry = algo.carry(fakes.COLUMNS)
        if name in ("td3", "fql"):
            return algo.act(algo.actor(state), whole | obs, carry, KEY, False).action.sum()
        return algo.outputs(state, whole | obs)["distribution"].entropy().sum()

    of_value, of_policy = jax.jit(jax.grad(value))(obs), jax.jit(jax.grad(policy))(obs)
    assert all(np.all(np.abs(x) > 0) for x in jax.tree.leaves(of_value))
    for read in (of_policy["seen"], of_policy["goal"]["kind"]):
        assert np.all(np.abs(read) > 0)
    for hidden in (of_policy["state"], of_policy["goal"]["at"]):
        np.testing.assert_array_equal(hidden, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "core"), [p for p in COMBINATIONS if fakes.make(p.values[0]).on_policy and p.values[1] != "lru"]
)
def test_no_gradient_of_the_policy_loss_comes_of_it(name, core):
    """That of the value loss does."""

    def loss(default, net, params, batch):
        value, metrics = default(params, batch)

        def part(metric, hidden):
            rows = batch.obs.obs if isinstance(batch.obs, Window) else batch.obs
            rows = {**rows, "state": hidden}
            obs = dataclasses.replace(batch.obs, obs=rows) if isinstance(batch.obs, Window) else rows
            return default(params, batch.replace(obs=obs))[1][metric]

        hidden = (batch.obs.obs if isinstance(batch.obs, Window) else batch.obs)["state"]
        found = {
            f"reached/{metric}": jnp.abs(jax.grad(lambda x, metric=metric: part(metric, x))(hidden)).max()
            for metric in ("loss/policy", "loss/value", "policy/entropy")
        }
        return value, metrics | found

    config = fakes.config(name, num_epochs=1, num_minibatches=1) if name != "a2c" else fakes.config(name)
    algo = algos.get(name).make(config, spec(name, observed(name)), network(core), loss=loss)
    state = fakes.perturbed(fakes.made_up_state(algo))
    _, aux = jax.jit(algo.update)(state, drawn(name, core)[3], KEY)
    assert float(aux.metrics["reached/loss/policy"]) == float(aux.metrics["reached/policy/entropy"]) == 0.0
    assert float(aux.metrics["reached/loss/value"]) > 0.0


@pytest.mark.parametrize("name", CRITICS)
def test_the_policy_begins_as_one_of_an_environment_without_it(name):
    """The same parameters; those of the critics read more."""
    without = Dict((("seen", Box((3,))), ("goal", Dict((("kind", Box((1,))),)))))
    encoders = {"seen": "mlp", "goal/kind": "mlp"}
    algo = fakes.make(name, spec(name), network(encoders={**encoders, "state": "mlp"}, encoder_hidden=(5,)))
    plain = NetworkConfig(hidden=(8,), encoders=encoders, encoder_hidden=(5,))
    shapes = [jax.eval_shape(made.init, KEY).params for made in (algo, fakes.make(name, spec(name, without), plain))]
    own = [params.get("actor", {k: x for k, x in params.items() if "policy" in k}) for params in shapes]
    assert own[0] == own[1]
    critics = [params.get("critic", {k: x for k, x in params.items() if "value" in k}) for params in shapes]
    assert critics[0] != critics[1]
    assert any("encoder_state" in jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(critics[0]))


@pytest.mark.parametrize("name", [name for name in algos.names() if not fakes.in_teams(name)])
def test_what_has_no_critic_refuses_it_by_name(name):
    if name in CRITICS or fakes.has_teacher(name):
        fakes.make(name, spec(name), network())
        return
    with pytest.raises(InputError) as e:
        fakes.make(name, spec(name), network())
    others = "ppo, a2c, impala, appo, trpo, vmpo, reppo, sac, td3, iql, mpo, fql or awr"
    instead = "marwil" if fakes.from_data(name) else others
    assert e.value.errors == (
        f"network.value_inputs: {name} has no critic beside its policy: use {instead}, or leave this out",
    )


# ---------------------------------------------------------------- runs


def run(out, name, *args):
    command = [
        "--algo", name, "--env", "hidden_state:hidden_sign", "--set", "env.num_envs=16", "--set", "rollout.length=16",
        "--set", "network.hidden=[16]", "--set", "run.log=[jsonl]", "--out", str(out), *args,
    ]  # fmt: skip
    return train.main(command)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n == "ppo" else [pytest.mark.slow]) for n in CRITICS if not fakes.from_data(n)],
)
def test_a_run_with_memory_is_trained_and_resumed(name, tmp_path, capsys):
    """Evaluated, too, and on two devices."""
    more = [
        "network.value_inputs=[state]",
        "network.core={name: gru, size: 8}",
        "devices.fake=2",
        "checkpoint.every=256",
    ]
    more += ["evaluation.every=512", "evaluation.duration=4", "algo.normalize_obs=true", "run.report_every=256"]
    if name in ("sac", "td3", "iql", "mpo", "fql", "awr"):
        more += ["replay.learning_starts=128", "replay.batch_size=16", "replay.updates_per_step=0.0078125"]
        more += ["network.max_seq_len=4", "replay.capacity=2000"]
    if name in ("td3", "fql"):
        more += ["env.options={continuous: true}"]
    sets = [part for value in more for part in ("--set", value)]
    assert run(tmp_path / "run", name, *sets, "--stop", "env_steps=512") == 0, capsys.readouterr().err
    assert train.main(["--resume", str(tmp_path / "run"), "--stop", "env_steps=1024"]) == 0, capsys.readouterr().err
    rows = loggers.read_rows(tmp_path / "run" / "result.jsonl")
    assert rows[-1]["env_steps"] >= 1024
    assert checkpoint.read_meta(checkpoint.locate(tmp_path / "run"))["config"]["network"]["value_inputs"] == ["state"]
