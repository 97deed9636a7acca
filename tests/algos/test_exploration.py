"""Exploration as a section of a config: schedules, random actions at the start, carries, a user's own."""

import dataclasses
import functools
import itertools
import sys

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import some_quick
from scipy import stats

from jrl import algos, distributions
from jrl.algos import exploration
from jrl.algos.exploration import (
    Custom,
    EpsilonGreedy,
    Gaussian,
    HeldNoise,
    OrnsteinUhlenbeck,
    ParameterNoiseAction,
    ParameterNoiseQ,
    Random,
    SoftQ,
    Stochastic,
)
from jrl.errors import InputError
from jrl.types import Box, Discrete, MultiDiscrete, element

N = 20_000
KEY = jax.random.key(5)
Q = np.broadcast_to(np.float32([0.1, 0.7, -0.4]), (N, 3))
SPACES = {"q": Discrete(3), "action": Box((2,), low=-1.0, high=1.0), "distribution": MultiDiscrete((3, 2))}
OUTPUTS = {
    "q": Q,
    "action": np.full((N, 2), 0.5, np.float32),
    "distribution": distributions.MultiCategorical(
        np.broadcast_to(np.float32([1.0, 3.0, 0.0, 1.0, -1.0]), (N, 5)), (3, 2)
    ),
}
KINDS = {
    EpsilonGreedy: "q",
    SoftQ: "q",
    ParameterNoiseQ: "q",
    Gaussian: "action",
    OrnsteinUhlenbeck: "action",
    ParameterNoiseAction: "action",
    Stochastic: "distribution",
}
ALL = [cls() for cls in KINDS]
each = pytest.mark.parametrize("cfg", ALL, ids=lambda cfg: type(cfg).__name__)


def kind_of(cfg):
    return KINDS[type(cfg)]


def made(cfg):
    kind = kind_of(cfg)
    explorer = exploration.make(cfg, SPACES[kind], kinds=(kind,))
    assert explorer.kind == kind
    return explorer, OUTPUTS[kind]


@functools.cache
def sampler(cfg):
    """Compiled once for all of its draws."""
    explorer, output = made(cfg)
    draw = jax.jit(lambda output, key, env_steps: explorer.sample(output, key, env_steps, explorer.carry(N)))
    return lambda env_steps, key: draw(output, key, np.uint32(env_steps))


def sample(cfg, *, env_steps=0, key=KEY):
    return sampler(cfg)(env_steps, key)


@each
def test_actions_of_the_space_and_the_same_from_the_same_key(cfg):
    explorer, _ = made(cfg)
    action, carry = sample(cfg)
    space = SPACES[explorer.kind]
    assert (action.shape, action.dtype) == ((N, *space.shape), space.dtype)
    assert jax.tree.structure(carry) == jax.tree.structure(explorer.carry(N))  # it can be a scan's carry
    again, _ = sample(cfg)
    other, _ = sample(cfg, key=jax.random.key(6))
    np.testing.assert_array_equal(action, again)
    if not isinstance(cfg, ParameterNoiseAction):  # whose noise is in the output already
        assert not np.array_equal(action, other)


@pytest.mark.parametrize("cfg", some_quick(ALL, SoftQ(), Gaussian()), ids=lambda cfg: type(cfg).__name__)
def test_the_first_actions_are_uniform(cfg):
    cfg = dataclasses.replace(cfg, random_timesteps=100)
    if isinstance(cfg, EpsilonGreedy):  # whose epsilon is nearly 1 there
        cfg = dataclasses.replace(cfg, epsilon=0.1)
    space = SPACES[kind_of(cfg)]

    def pvalue(env_steps):
        action = np.asarray(sample(cfg, env_steps=env_steps)[0])
        if isinstance(space, Box):
            return stats.kstest(action.ravel(), stats.uniform(-1, 2).cdf).pvalue
        joint = action if isinstance(space, Discrete) else action[:, 0] * 2 + action[:, 1]
        n = 3 if isinstance(space, Discrete) else 6
        return stats.chisquare(np.bincount(joint, minlength=n)).pvalue

    assert pvalue(0) > 1e-3
    assert pvalue(99) > 1e-3
    assert pvalue(100) < 1e-6
    same = sample(cfg, env_steps=100)[0]
    np.testing.assert_array_equal(same, sample(dataclasses.replace(cfg, random_timesteps=0), env_steps=100)[0])


@pytest.mark.parametrize(("env_steps", "epsilon"), [(0, 1.0), (500, 0.6), (1000, 0.2), (10**9, 0.2)])
def test_epsilon_follows_its_schedule(env_steps, epsilon):
    cfg = EpsilonGreedy(epsilon=((0, 1.0), (1000, 0.2)))
    best = np.asarray(sample(cfg, env_steps=env_steps)[0]) == 1
    np.testing.assert_allclose(best.mean(), 1 - epsilon * 2 / 3, atol=0.015)


def test_temperature_and_deviation_follow_their_schedules():
    schedule = ((0, 1.0), (100, 0.1))
    explorer = exploration.make(Gaussian(std=schedule), SPACES["action"], kinds=("action",))
    noisy = jax.jit(lambda env_steps: explorer.sample(jnp.zeros((N, 2)), KEY, env_steps, ())[0])
    for env_steps, value in ((0, 1.0), (50, 0.55), (200, 0.1)):
        action = np.asarray(sample(SoftQ(temperature=schedule), env_steps=env_steps)[0])
        np.testing.assert_allclose(np.bincount(action, minlength=3) / N, jax.nn.softmax(Q[0] / value), atol=0.015)
        noise = noisy(np.uint32(env_steps))
        expected = np.clip(value * stats.norm.ppf((np.arange(N) + 0.5) / N), -1, 1).std()
        np.testing.assert_allclose(np.std(noise), expected, rtol=0.02)


def test_the_ladder_gives_each_environment_its_epsilon():
    explorer = exploration.make(EpsilonGreedy(ladder=True), Discrete(3), kinds=("q",))
    keys = jax.random.split(KEY, 4000)
    act = jax.jit(lambda q, carry: jax.vmap(lambda key: explorer.sample(q, key, jnp.uint32(0), carry)[0])(keys))
    actions = act(Q[:4], explorer.carry(4))
    # 0.4 ** (1 + 7 i / 3)
    epsilon = np.asarray([0.4, 0.4 ** (10 / 3), 0.4 ** (17 / 3), 0.4**8])
    np.testing.assert_allclose((np.asarray(actions) != 1).mean(0), epsilon * 2 / 3, atol=0.02)
    # two of them elsewhere, in another order: each is who it is
    elsewhere = explorer.carry(2, first=2, total=4)[::-1]
    np.testing.assert_allclose((np.asarray(act(Q[:2], elsewhere)) != 1).mean(0), epsilon[:1:-1] * 2 / 3, atol=0.02)
    # another base, which may be a schedule
    cfg = EpsilonGreedy(ladder=True, ladder_base=((0, 1.0), (100, 0.0)), ladder_alpha=0.0)
    explorer = exploration.make(cfg, Discrete(3), kinds=("q",))
    greedy = jax.jit(explorer.sample)(Q, KEY, jnp.uint32(100), explorer.carry(N))[0]
    np.testing.assert_array_equal(greedy, np.ones(N))


def test_ornstein_uhlenbeck_noise_is_the_carry():
    explorer = exploration.make(OrnsteinUhlenbeck(sigma=0.1), Box((2,), low=-1.0, high=1.0), kinds=("action",))
    carry = explorer.carry(3)
    np.testing.assert_array_equal(carry, np.zeros((3, 2)))
    noises = []
    sample = jax.jit(explorer.sample)
    for key in jax.random.split(KEY, 3):
        action, carry = sample(np.full((3, 2), 0.3, np.float32), key, np.uint32(0), carry)
        np.testing.assert_allclose(action, np.clip(0.3 + np.asarray(carry), -1, 1), rtol=1e-6)
        noises.append(carry)
    # each noise is 0.85 of the one before it plus something of deviation 0.1: reset it and that part is gone
    reset = explorer.carry(3)
    step = lambda noise: np.asarray(sample(np.zeros((3, 2), np.float32), KEY, np.uint32(0), noise)[1])
    np.testing.assert_allclose(step(noises[-1]) - step(reset), 0.85 * np.asarray(noises[-1]), rtol=1e-4, atol=1e-6)


def test_held_noise_stays_for_its_steps():
    """20,000 environments: the noise of an action, and how long each noise stays, next to n ** -2."""
    policy = distributions.action_distribution(Box((2,), low=-1.0, high=1.0), squash=True)
    dist = policy.make(np.full((N, 2), 0.2, np.float32), np.full((N, 2), -1.0, np.float32))
    explorer = exploration.make(HeldNoise(longest=4), Box((2,), low=-1.0, high=1.0), kinds=("distribution",))
    sample, carry, noises = jax.jit(explorer.sample), explorer.carry(N), []
    for key in jax.random.split(KEY, 5):
        action, carry = sample(dist, key, np.uint32(0), carry)
        noise = (np.arctanh(np.asarray(action)) - 0.2) / np.exp(-1.0)
        np.testing.assert_allclose(noise, carry[0], atol=1e-3)
        noises.append(noise)
    np.testing.assert_allclose([noises[0].mean(), noises[0].std()], [0.0, 1.0], atol=0.02)
    same = np.array([np.all(np.isclose(a, noises[0], atol=1e-2), -1) for a in noises])
    steps = np.argmin(same, 0)  # the first step with another noise
    share = np.array([np.mean(steps == n) for n in range(1, 5)])
    np.testing.assert_allclose(share, np.array([1, 1 / 4, 1 / 9, 1 / 16]) / 1.4236, atol=0.02)
    with pytest.raises(InputError, match="held_noise needs a Box action space"):
        exploration.make(HeldNoise(), Discrete(3), kinds=("distribution",))


@pytest.mark.parametrize(("cfg", "kinds"), [*itertools.product(ALL, [("q",), ("action",), ("action", "distribution")])])
def test_what_an_algorithm_cannot_feed_is_named(cfg, kinds):
    if kind_of(cfg) in kinds:
        exploration.make(cfg, SPACES[kind_of(cfg)], kinds)
        return
    with pytest.raises(InputError) as e:
        exploration.make(cfg, Discrete(3), kinds)
    assert f"algo.exploration.name: {cfg.name} does not fit" in str(e.value)
    fitting = str(e.value).partition("choose one of ")[2].split(", ")
    by_kind = {**KINDS, HeldNoise: "distribution"}
    assert fitting == [cls().name for cls, kind in by_kind.items() if kind in kinds] + ["random", "custom"]


def test_q_values_need_a_discrete_space():
    with pytest.raises(InputError, match="Discrete action space"):
        exploration.make(EpsilonGreedy(), Box((2,)), kinds=("q",))


def test_faulty_values():
    assert [m for cfg in ALL for m in exploration.validate(cfg)] == []
    assert exploration.validate(Custom()) == [
        "exploration.path is missing: expected package.module:name of a function or a class"
    ]


# ---------------------------------------------------------------- random actions and their log-probability

UNIFORM = {  # space -> log-probability of each uniformly random action
    Discrete(3): -np.log(3),
    MultiDiscrete((3, 2)): -np.log(6),
    Box((2,), low=(0.0, -1.0), high=(4.0, 2.0)): -np.log(4) - np.log(3),
    Box((2,), low=(0.0, -np.inf), high=(0.5, 3.0)): -np.log(0.5) - np.log(2),  # the second within [-1, 1]
}


def policy_over(space):
    """A distribution far from uniform, [N]."""
    if isinstance(space, Box):
        return distributions.DiagGaussian(jnp.full((N, 2), 0.3), jnp.full((2,), -1.0))
    size = space.n if isinstance(space, Discrete) else sum(space.nvec)
    logits = jnp.broadcast_to(jnp.linspace(0.0, 2.0, size), (N, size))
    return (
        distributions.Categorical(logits)
        if isinstance(space, Discrete)
        else distributions.MultiCategorical(logits, space.nvec)
    )


@pytest.mark.parametrize("space", UNIFORM, ids=str)
def test_the_log_probability_is_of_what_chose_the_action(space):
    dist = policy_over(space)
    early, late = jnp.uint32(9), jnp.uint32(10)
    draws = [
        jax.jit(exploration.make(cfg, space, kinds=("distribution",)).sample_and_log_prob)
        for cfg in (Stochastic(random_timesteps=10), Random())
    ]
    for draw in draws:
        action, log_prob, _ = draw(dist, KEY, early, ())
        assert (action.shape, action.dtype) == ((N, *space.shape), space.dtype)
        np.testing.assert_allclose(log_prob, np.full(N, UNIFORM[space]), rtol=1e-6)
        values = np.asarray(action).reshape(N, -1)
        if isinstance(space, Box):
            low, high = (np.where(np.isinf(space.bounds()[0]), x, b) for x, b in zip((-1.0, 1.0), space.bounds()))
            for i in range(2):
                assert stats.kstest(values[:, i], stats.uniform(low[i], high[i] - low[i]).cdf).pvalue > 1e-3
        else:
            assert stats.chisquare(np.unique(values, axis=0, return_counts=True)[1]).pvalue > 1e-3
    action, log_prob, _ = draws[0](dist, KEY, late, ())
    same = jax.jit(lambda dist: dist.sample(KEY))(dist)
    np.testing.assert_array_equal(action, same)
    np.testing.assert_allclose(log_prob, jax.jit(lambda dist, action: dist.log_prob(action))(dist, same), rtol=1e-6)


@pytest.mark.parametrize(
    "name",
    some_quick([n for n in algos.names() if not (fakes.has_members(n) or fakes.searches(n))], "ppo", "dqn", "td3"),
)
def test_every_algorithm_can_act_at_random(name):
    algo = fakes.make(name, exploration=Random())
    actor = algo.actor(fakes.perturbed(fakes.made_up_state(algo)))
    like = element(fakes.spec(name=name).observation)
    obs = jax.tree.map(lambda x: jnp.ones((3000, *x.shape), x.dtype), like)
    act = jax.jit(algo.act, static_argnames="explore")
    out = act(actor, obs, algo.carry(3000), KEY)
    if name == "td3":
        assert stats.kstest(np.ravel(out.action), stats.uniform(-1, 2).cdf).pvalue > 1e-3
    else:
        assert stats.chisquare(np.bincount(np.ravel(out.action), minlength=3)).pvalue > 1e-3
    if "log_prob" in out.extras:
        np.testing.assert_allclose(out.extras["log_prob"], -np.log(3) * np.ones(3000), rtol=1e-6)
    greedy = act(actor, obs, algo.carry(3000), KEY, explore=False).action
    assert (np.asarray(greedy) == np.asarray(greedy)[:1]).all()  # and not where it does not explore


# ---------------------------------------------------------------- a user's own


def inverted(dist, key, env_steps, carry):
    """The opposite policy, and its log-probability."""
    opposite = distributions.Categorical(-dist.logits)
    return *opposite.sample_and_log_prob(key), carry


def best(dist, key, env_steps, carry):
    return dist.mode(), carry


def without_carry(dist, key, env_steps, carry):
    return dist.mode()


def wrong_log_prob(dist, key, env_steps, carry):
    return dist.mode(), jnp.zeros(()), carry


def test_a_custom_one_over_a_distribution_may_give_the_log_probability():
    logits = jnp.broadcast_to(jnp.asarray([0.0, 1.0, 2.0]), (5, 3))
    dist = distributions.Categorical(logits)
    of = lambda name: custom(name, kinds=("distribution",)).sample_and_log_prob
    act = lambda name: jax.jit(of(name))(dist, KEY, np.uint32(0), ())
    action, log_prob, _ = act("inverted")
    np.testing.assert_allclose(log_prob, jax.nn.log_softmax(-logits[0])[action], rtol=1e-6)
    action, log_prob, _ = act("best")
    np.testing.assert_allclose(log_prob, np.full(5, jax.nn.log_softmax(logits[0])[2]), rtol=1e-6)
    with pytest.raises(InputError, match=r"must return \(action, carry\) or \(action, log_prob, carry\), not Arra"):
        of("without_carry")(dist, KEY, np.uint32(0), ())
    with pytest.raises(InputError, match=r"log_prob must have the shape \(5,\), one number for each action, not \(\)"):
        of("wrong_log_prob")(dist, KEY, np.uint32(0), ())
    algo = fakes.make("ppo", exploration=Custom(path=f"{__name__}:inverted"))
    actor = algo.actor(fakes.made_up_state(algo))
    assert set(jax.eval_shape(algo.act, actor, np.ones((5, 4)), algo.carry(5), KEY).extras) == {"log_prob"}


def always(output, key, env_steps, carry, *, action=0):
    return jnp.full(output.shape[:1], action, jnp.int32), carry


class Sweep:
    """Takes one action after the other, from `start` on, in each episode."""

    def __init__(self, start=0):
        self.start = start

    def carry(self, batch_size):
        return jnp.full((batch_size,), self.start, jnp.int32)

    def __call__(self, output, key, env_steps, carry):
        return carry % output.shape[-1], carry + 1


class Stateless:
    def __call__(self, output, key, env_steps, carry):
        return jnp.argmin(output, -1), carry


class NotCallable:
    pass


def custom(name, kinds=("q",), **options):
    return exploration.make(Custom(path=f"{__name__}:{name}", options=options), Discrete(3), kinds)


def test_a_custom_function():
    explorer = custom("always", action=2)
    action, carry = jax.jit(explorer.sample)(Q[:5], KEY, jnp.uint32(0), explorer.carry(5))
    np.testing.assert_array_equal(action, np.full(5, 2))
    assert carry == ()
    assert custom("always", kinds=("distribution", "q")).kind == "distribution"


def test_a_custom_class():
    explorer = custom("Sweep", start=1)
    carry = explorer.carry(2)
    actions = []
    for _ in range(4):
        action, carry = jax.jit(explorer.sample)(Q[:2], KEY, jnp.uint32(0), carry)
        actions.append(action.tolist())
    assert actions == [[1, 1], [2, 2], [0, 0], [1, 1]]
    dotted = exploration.make(Custom(path=f"{__name__}.Sweep"), Discrete(3), kinds=("q",))
    np.testing.assert_array_equal(dotted.carry(2), [0, 0])
    stateless = custom("Stateless")
    assert stateless.carry(2) == ()
    np.testing.assert_array_equal(stateless.sample(Q[:2], KEY, jnp.uint32(0), ())[0], [2, 2])


def test_a_config_with_options_can_be_static_and_compared():
    cfg = Custom(path="a:b", options={"x": [1, 2]})
    same = jax.tree.map(lambda x: x, cfg)
    assert cfg == same and hash(cfg) == hash(same)
    assert cfg != Custom(path="a:b", options={"x": [1, 3]})
    assert jax.jit(lambda cfg: jnp.zeros(len(cfg.options)))(cfg).shape == (1,)


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("noise", {}, "expected package.module:name, such as my_project.mine:fn, got 'noise'"),
        (":explore", {}, "expected package.module:name"),
        (
            "no.such:explore",
            {},
            "no.such cannot be imported (No module named 'no'): start the command in the module's directory",
        ),
        (f"{__name__}:alway", {}, "has no function or class alway: did you mean always?"),
        (f"{__name__}:N", {}, "has no function or class N"),
        (f"{__name__}:always", {"acton": 1}, "cannot be called as (output, key, env_steps, carry, acton)"),
        (f"{__name__}:kind_of", {}, "it takes (cfg) and cannot be called as (output, key, env_steps, carry)"),
        (f"{__name__}:Sweep", {"begin": 1}, "it takes (start=0) and cannot be called as (begin)"),
        (f"{__name__}:NotCallable", {}, "needs a method __call__(self, output, key, env_steps, carry)"),
    ],
)
def test_a_faulty_path_is_one_error_with_its_mend(path, options, message):
    with pytest.raises(InputError) as e:
        exploration.make(Custom(path=path, options=options), Discrete(3), kinds=("q",))
    assert len(e.value.errors) == 1
    assert "algo.exploration.path" in str(e.value)
    assert path in str(e.value)
    assert message in str(e.value)


def test_a_module_that_fails_in_its_own_imports(tmp_path, monkeypatch):
    (tmp_path / "my_noise.py").write_text("import no_such_library_at_all\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InputError, match=r"my_noise cannot be imported .*no_such_library_at_all"):
        exploration.make(Custom(path="my_noise:explore"), Discrete(3), kinds=("q",))
    sys.modules.pop("my_noise", None)
