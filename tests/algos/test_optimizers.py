"""`algo.optimizer`: each against a plain record of its steps, and within the algorithms."""

import dataclasses

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.algos import dqn, gradients, optimizers, ppo, sac
from jrl.algos.optimizers import Adam, AdamW, Muon, RmsProp, Sgd

KEY = jax.random.key(0)
PARAMS = {"kernel": np.array([[1.0, -2.0], [0.5, 3.0]], np.float32), "bias": np.array([2.0, -1.0], np.float32)}
RNG = np.random.default_rng(0)
GRADIENTS = [{name: RNG.normal(size=x.shape).astype(np.float32) for name, x in PARAMS.items()} for _ in range(3)]
LR = 0.1


def steps(cfg, params=PARAMS, gradients_=None, flat=True):
    """The parameters after each step of size LR, as `agent.descend` makes them."""
    optimizer = optimizers.make(cfg, flat=flat)
    state, found = optimizer.init(params), []
    for gradient in gradients_ or GRADIENTS:
        direction, state = jax.jit(optimizer.update)(gradient, state, params)
        params = jax.tree.map(lambda p, u: p - LR * u, params, direction)
        found.append(params)
    return found


def adam(array, gradients_, b1, b2, eps, decay):
    m = v = np.zeros_like(array)
    for t, g in enumerate(gradients_, 1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        array = array - LR * (m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps) + decay * array)
        yield array


def sgd(array, gradients_, momentum, nesterov, decay):
    sum_ = np.zeros_like(array)
    for g in gradients_:
        sum_ = g + momentum * sum_
        array = array - LR * ((g + momentum * sum_ if nesterov else sum_) + decay * array)
        yield array


def rmsprop(array, gradients_, rate, eps, momentum, decay):
    v, sum_ = np.ones_like(array), np.zeros_like(array)
    for g in gradients_:
        v = rate * v + (1 - rate) * g * g
        sum_ = g / np.sqrt(v + eps) + momentum * sum_
        array = array - LR * (sum_ + decay * array)
        yield array


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize(
    ("optimizer", "record", "numbers"),
    [
        (Adam(b1=0.5, b2=0.9), adam, (0.5, 0.9, 1e-3, 0.0)),
        (Adam(eps=0.25), adam, (0.9, 0.999, 0.25, 0.0)),
        (AdamW(weight_decay=0.3, b1=0.5), adam, (0.5, 0.999, 1e-3, 0.3)),
        (Sgd(), sgd, (0.0, False, 0.0)),
        (Sgd(momentum=0.5, nesterov=True, weight_decay=0.3), sgd, (0.5, True, 0.3)),
        (RmsProp(decay=0.8, eps=0.01, momentum=0.5, weight_decay=0.3), rmsprop, (0.8, 0.01, 0.5, 0.3)),
    ],
    ids=lambda x: type(x).__name__ if dataclasses.is_dataclass(x) else "",
)
def test_steps_are_those_of_a_plain_record(optimizer, record, numbers, flat):
    """Weight decay is the last number, and it is for the kernel alone."""
    found = steps(ppo.Config(optimizer=optimizer, adam_eps=1e-3, max_grad_norm=None), flat=flat)
    for name, decay in (("kernel", numbers[-1]), ("bias", 0.0)):
        wanted = record(PARAMS[name].astype(np.float64), [g[name] for g in GRADIENTS], *numbers[:-1], decay)
        for step, array in zip(found, wanted, strict=True):
            np.testing.assert_allclose(step[name], array, rtol=1e-5)


def test_gradients_are_clipped_before_and_decay_is_not():
    g = {name: 10.0 * x for name, x in GRADIENTS[0].items()}
    norm = np.sqrt(sum(np.sum(x**2) for x in g.values()))
    cfg = ppo.Config(optimizer=Sgd(weight_decay=0.3), max_grad_norm=0.5)
    (found,) = steps(cfg, gradients_=[g])
    np.testing.assert_allclose(found["bias"], PARAMS["bias"] - LR * 0.5 * g["bias"] / norm, rtol=1e-5)
    kernel = PARAMS["kernel"] - LR * (0.5 * g["kernel"] / norm + 0.3 * PARAMS["kernel"])
    np.testing.assert_allclose(found["kernel"], kernel, rtol=1e-5)


def orthogonalised(x):
    """The iteration of Newton and Schulz that Muon has, with its five steps and coefficients."""
    transposed = x.shape[0] > x.shape[1]
    x = (x.T if transposed else x) / (np.linalg.norm(x) + 1e-8)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if transposed else x


def test_muon_orthogonalises_matrices_and_stacks_of_matrices():
    """The first step: with bias correction the momentum is the gradient times a number, which does not matter."""
    params = {"kernel": RNG.normal(size=(6, 3)), "stack": {"kernel": RNG.normal(size=(2, 3, 5))}}
    params |= {"conv": {"kernel": RNG.normal(size=(2, 2, 3, 4))}, "bias": RNG.normal(size=(6,))}
    params = jax.tree.map(lambda x: x.astype(np.float32), params)
    gradient = jax.tree.map(lambda x: RNG.normal(size=x.shape).astype(np.float32), params)
    cfg = ppo.Config(optimizer=Muon(weight_decay=0.3), adam_eps=1e-8, max_grad_norm=None)
    (found,) = steps(cfg, params, [gradient])
    wanted = lambda w, g: w - LR * (0.2 * np.sqrt(max(g.shape)) * orthogonalised(g) + 0.3 * w)
    kernel, stack = params["kernel"], params["stack"]["kernel"]
    np.testing.assert_allclose(found["kernel"], wanted(kernel, gradient["kernel"]), atol=1e-4)
    for i in range(2):
        one = wanted(stack[i], gradient["stack"]["kernel"][i])
        np.testing.assert_allclose(found["stack"]["kernel"][i], one, atol=1e-4)
    # Adam with Nesterov momentum: b1 m^ / (1 - b1^2) and (1 - b1) g / (1 - b1), with m = (1 - b1) g
    sign = lambda g: np.sign(g) * (0.9 * 0.1 / (1 - 0.9**2) + 1)
    np.testing.assert_allclose(found["bias"], params["bias"] - LR * sign(gradient["bias"]), rtol=1e-4)
    conv, g = params["conv"]["kernel"], gradient["conv"]["kernel"]
    np.testing.assert_allclose(found["conv"]["kernel"], conv - LR * (sign(g) + 0.3 * conv), rtol=1e-4, atol=1e-5)


def test_floats_may_differ_between_members_of_a_population():
    options = [{"weight_decay": 0.0, "b1": 0.9}, {"weight_decay": 0.3, "b1": 0.5}]
    each = [ppo.Config(optimizer=AdamW(**values)) for values in options]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *each)
    for flat in (True, False):
        found = jax.vmap(lambda cfg, flat=flat: steps(cfg, flat=flat)[-1])(stacked)
        for i, cfg in enumerate(each):
            fakes.assert_close(fakes.part(found, i), steps(cfg, flat=flat)[-1], atol=1e-6)


@pytest.mark.parametrize("optimizer", [AdamW(weight_decay=0.5), pytest.param(Muon(), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("module", [ppo, pytest.param(sac, marks=pytest.mark.slow)], ids=lambda m: m.__name__)
def test_an_algorithm_learns_with_it(module, optimizer):
    """All parameters move, those of the policy and of critics; with step size 0 none does, by decay neither."""
    name = module.__name__.rpartition(".")[2]
    spec = fakes.spec(fakes.BOX, name=name)
    for lr in (0.0, 1e-2):
        algo = module.make(fakes.config(name, lr=lr, optimizer=optimizer), spec, fakes.NETWORK)
        state = algo.init(KEY)
        data = fakes.data(algo, spec, algo.actor(state))
        after, _ = fakes.learn(algo)(state, data, KEY)
        for old, new in zip(jax.tree.leaves(state.params), jax.tree.leaves(after.params), strict=True):
            assert np.all(np.isfinite(new)) and bool(np.any(old != new)) == bool(lr)


def test_gradients_are_taken_and_given():
    """A gradient that was taken and is given makes the step of the update, moments and weight decay included."""
    spec, cfg = fakes.spec(name="dqn"), fakes.config("dqn", optimizer=AdamW(weight_decay=0.5), lr=0.1)
    make = lambda: dqn.make(cfg, spec, fakes.NETWORK)
    algo = make()
    with gradients.taken():
        taking = make()
    with gradients.given():
        giving = make()
    state = algo.init(KEY)
    data = fakes.data(algo, spec, algo.actor(state))
    wanted = algo.update(state, data, KEY)[0]
    taken = taking.update(dataclasses.replace(state, opt_state=taking.init(KEY).opt_state), data, KEY)[0]
    fakes.assert_same(taken.params, state.params)
    given = gradients.Given(state.opt_state, taken.opt_state.mean(), jnp.zeros((), bool))
    after = giving.update(dataclasses.replace(state, opt_state=given), data, KEY)[0]
    fakes.assert_close(after.params, wanted.params, atol=1e-6)
    fakes.assert_close(after.opt_state.state, wanted.opt_state, atol=1e-6)
