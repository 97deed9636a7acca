"""A user's loss in the place of each algorithm's own: what it gets, what its gradient does, what it may return."""

import functools

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES

from jrl import algos
from jrl.algos import custom_loss, parts
from jrl.distributions import Categorical
from jrl.errors import InputError
from jrl.fields.data import Replay, learns_from

# populations have no loss; trpo refuses them: test_trpo.py
NAMES = tuple(name for name in algos.names() if not fakes.has_members(name) and name != "trpo")
KEY = jax.random.key(2)
# with TD errors, so with a TdBatch and priorities: AWR has neither
REPLAY = [name for name in NAMES if learns_from(algos.get_config_class(name)) is Replay and name != "awr"]


def each(*quick):
    """Every algorithm; in the quick set those named, which between the tests are one for each place of a loss."""
    return pytest.mark.parametrize(
        "name", [pytest.param(n, marks=[] if n in quick else pytest.mark.slow) for n in NAMES]
    )


def make(name, loss=None, **options):
    one_step = {"num_epochs": 1, "num_minibatches": 1} if "num_epochs" in CASES[name].small else {}
    options = {**one_step, "max_grad_norm": None, **options}
    return fakes.make(name, loss=loss, **options)


@functools.cache
def start(name):
    algo = make(name)
    state = fakes.perturbed(fakes.made_up_state(algo))
    return state, fakes.data(algo, fakes.spec(name=name), algo.actor(state))


def update(name, loss=None, **options):
    state, data = start(name)
    return jax.jit(fakes.learn(make(name, loss, **options)))(state, data, KEY)


@functools.cache
def own(name):
    return update(name)


def mean(batch, x):
    return jnp.mean(batch.weight * x)


def from_the_network(name, net, params, batch):
    """(metric of the algorithm's own loss, the same by the network and the batch that a user's loss gets)."""
    if getattr(fakes.config(name), "draws", False):  # the network gives a user's loss what is not drawn
        return "value/target", mean(batch, batch.target.mean(-1))
    if hasattr(net, "q"):
        q = jnp.take_along_axis(net.q(params, batch.obs), batch.action[..., None], -1)[..., 0]
        return "value/q", mean(batch, q.sum(-1) if fakes.in_teams(name) else q)
    if name in ("reppo", "sac", "iql", "mpo"):
        q = jnp.take_along_axis(net.apply(params, batch.obs), batch.action[None, :, None], -1)[..., 0]
        return "value/q", mean(batch, q.mean(0))
    if name in ("td3", "fql"):
        return "value/q", mean(batch, net.apply(params, batch.obs, batch.action).mean(0))
    if name == "muzero":
        logits, _ = net.predict(params, net.begin(params, batch.obs))
        return "policy/entropy", mean(batch, Categorical(logits).entropy())
    found = net.apply(params, batch.obs)
    dist = found[0] if isinstance(found, tuple) else found
    return "policy/entropy", mean(batch, dist.entropy())


@each("ppo")
def test_a_loss_that_adds_nothing_changes_nothing_and_sees_what_the_own_one_sees(name):
    compared = {}

    def loss(default, net, params, batch):
        value, metrics = default(params, batch)
        nothing = 0.0 * sum(jnp.sum(x**2) for x in jax.tree.leaves(params))
        theirs, mine = from_the_network(name, net, params, batch)
        compared.update(theirs=theirs)
        if name in REPLAY:
            assert isinstance(batch, parts.TdBatch)
            metrics = metrics | {"mine/target": mean(batch, jnp.mean(batch.target.reshape(len(batch.weight), -1), -1))}
        return value + nothing, metrics | {"mine": mine, "one": 1}

    (state, aux), (same, found) = own(name), update(name, loss)
    fakes.assert_same(state, same)
    assert differ_from_start(name, state)
    np.testing.assert_allclose(found.metrics["mine"], aux.metrics[compared["theirs"]], rtol=1e-5)
    assert float(found.metrics["one"]) == 1
    fakes.assert_same(aux.metrics, {k: found.metrics[k] for k in aux.metrics})
    if name in REPLAY:
        np.testing.assert_array_equal(aux.priority, found.priority)
        np.testing.assert_allclose(found.metrics["mine/target"], aux.metrics["value/target"], rtol=1e-6)


def differ_from_start(name, state):
    return fakes.differ(start(name)[0].params, state.params)


def gradient(name, state):
    """Of the first step, flat: Adam's first moment is a tenth of it."""
    opt_state = state.opt_state["critic"] if name in ("reppo", "sac", "td3", "iql", "mpo", "fql") else state.opt_state
    moments = [x for x in jax.tree.leaves(jax.tree.map(np.ravel, opt_state)) if x.dtype == np.float32]
    return np.concatenate(moments[: len(moments) // 2]) / 0.1


@each("dqn")
def test_the_gradient_is_that_of_the_users_loss(name):
    """Of 2 x default + 0.25 x the sum of all parameters it is 2 g + 0.25, exactly where clipping is off."""

    def loss(default, net, params, batch):
        value, _ = default(params, batch)
        return 2.0 * value + 0.25 * sum(jnp.sum(x) for x in jax.tree.leaves(params)), {"loss/mine": value}

    (state, aux), (after, found) = own(name), update(name, loss)
    before = gradient(name, state)
    assert np.abs(before).max() > 1e-3
    np.testing.assert_allclose(gradient(name, after), 2 * before + 0.25, rtol=1e-4, atol=1e-6)
    assert "loss/mine" in found.metrics
    own_value = {"loss/policy", "loss/value", "policy/entropy"} if name not in REPLAY else set()
    own_value = {"loss/value"} if name == "reppo" else own_value  # a user's loss is the critic's
    assert not own_value & found.metrics.keys()  # only what the user's loss gave
    if name in REPLAY:  # whatever the loss is
        np.testing.assert_allclose(found.priority, aux.priority, rtol=1e-6)


def test_the_default_follows_its_schedules():
    """The own loss that a user's gets is that of the present step, here with another entropy bonus."""

    def loss(default, net, params, batch):
        value, metrics = default(params, batch)
        return value, metrics | {"loss/total": value}

    algo = make("a2c", loss, ent_coef=((0, 0.0), (100, 1.0)), vf_coef=0.5)
    state, data = start("a2c")
    learn = jax.jit(algo.update)
    for env_steps, ent_coef in ((0, 0.0), (50, 0.5), (200, 1.0)):
        metrics = learn(state.replace(env_steps=jnp.uint32(env_steps)), data, KEY)[1].metrics
        expected = metrics["loss/policy"] + 0.5 * metrics["loss/value"] - ent_coef * metrics["policy/entropy"]
        np.testing.assert_allclose(metrics["loss/total"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_loss_over_pieces_of_a_batch_is_one_over_the_batch():
    def loss(default, net, params, batch):
        dist, value = net.apply(params, batch.obs)
        error = mean(batch, jnp.square(value - batch.target) - dist.log_prob(batch.action) * batch.advantage)
        return error, {"loss/mine": error}

    whole, pieces = (update("a2c", loss, microbatch_size=size)[1].metrics["loss/mine"] for size in (None, 8))
    np.testing.assert_allclose(whole, pieces, rtol=1e-5)


VALUE, METRICS = jnp.float32(1.0), {"x": jnp.float32(2.0)}


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (VALUE, "got ArrayImpl"),
        (None, "got NoneType"),
        ((VALUE, METRICS, ()), "got a tuple of 3"),
        ((VALUE, [1.0]), "its metrics are list instead of a dict"),
        ((VALUE, {1: VALUE}), "with names as keys"),
        ((jnp.ones((4,)), METRICS), "the loss is float32 (4,): take the mean over the rows"),
        ((VALUE, {"x": jnp.ones((2, 3))}), "x is float32 (2, 3): take the mean"),
        ((VALUE, {"x": "high"}), "x is str"),
        ((jnp.int32(1), METRICS), "the loss is int32 (): make it a float"),
    ],
    ids=lambda x: str(x)[:20],
)
def test_something_else_than_a_loss_is_one_error(result, message):
    default = lambda params, batch: (VALUE, METRICS)
    for made in (
        custom_loss.over_rows(lambda *given: result, default, None),
        custom_loss.over_replay(lambda *given: result, lambda params, batch: (VALUE, (METRICS, ())), None),
    ):
        with pytest.raises(InputError) as e:
            made({}, None)
        assert "custom.loss: it must return (loss, metrics), a scalar and a dict of scalars by name" in str(e.value)
        assert message in str(e.value)


@pytest.mark.parametrize("name", NAMES)
def test_a_function_with_other_arguments_is_refused_before_anything_runs(name):
    with pytest.raises(InputError, match=r"custom\.loss: it takes \(params, batch\) and cannot be called as \(default"):
        make(name, lambda params, batch: (0.0, {}))


def test_metrics_that_decide_something_must_be_there():
    loss = lambda default, net, params, batch: (default(params, batch)[0], {})
    for options, missing in (
        ({"target_kl": 0.1}, "policy/approx_kl"),
        ({"kl_coef": 0.2, "kl_target": 0.1}, "policy/kl"),
    ):
        algo, (_, rollout) = make("ppo", loss, **options), start("ppo")
        with pytest.raises(InputError, match=f"the config needs the metric {missing}, which it does not return"):
            jax.eval_shape(algo.update, jax.eval_shape(algo.init, KEY), rollout, KEY)
