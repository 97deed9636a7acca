"""Evolution strategies against plain records: the parameters that each member acts with, scores, steps; whole runs."""

import math

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import some_quick

from jrl import config, envs, train
from jrl.algos import ars, cma_es, es, evolution
from jrl.envs.jax_env import Definition
from jrl.errors import InputError
from jrl.fields.env import EnvConfig
from jrl.fields.hyper import Gru
from jrl.networks import NetworkConfig
from jrl.rollout import unroll
from jrl.rollout.collect import HostCollector
from jrl.run.session import Session
from jrl.types import Box, Dict, Discrete, EnvSpec, MultiBinary

KEY = jax.random.key(3)
LINEAR = NetworkConfig(hidden=())
MEMORY = NetworkConfig(hidden=(4,), core=Gru(size=4))
MASKED = Dict((("action_mask", MultiBinary((3,))), ("x", Box((3,)))))
MODULES = {"ars": ars, "es": es, "cma_es": cma_es}


def hill():
    """Four steps of reward -(action - 1/2)^2 from the same start; the same on any number of devices."""
    return Definition(
        observation=Box((1,)),
        action=Box((1,), low=-1.0, high=1.0),
        max_episode_steps=4,
        num_draws=1,
        reset=lambda draws: jnp.zeros_like(draws[0]),
        step=lambda x, action, draws: (x + 1.0, -((action[:, 0] - 0.5) ** 2), jnp.zeros(x.shape, bool)),
        observe=lambda x: x[:, None],
    )


# ---------------------------------------------------------------- acting


@pytest.mark.parametrize(
    ("observation", "action", "network"),
    some_quick(
        [(Box((3,)), Box((2,)), LINEAR), (MASKED, Discrete(3), LINEAR), (Box((3,)), Discrete(3), MEMORY)],
        (MASKED, Discrete(3), LINEAR),
    ),
    ids=["box", "masked", "gru"],
)
def test_each_environment_acts_with_its_members_parameters(observation, action, network):
    """For whole episodes: in each of two steps, environment i of 8 takes the best action of member i // 2 of 4."""
    spec = EnvSpec(observation, action, 8)
    algo = ars.make(ars.Config(population=4, noise_std=1.0), spec, network)
    state = algo.init(KEY)
    actor, carry, alone = algo.actor(state), algo.carry(8, 0, 8), [algo.carry(1, i, 8) for i in range(8)]
    pairs = jax.tree.map(lambda x, mean: x - mean[None], actor.noisy, actor.params)
    for leaf in jax.tree.leaves(pairs):
        np.testing.assert_allclose(leaf[:2], -leaf[2:], atol=1e-6)
    every = ars.make(ars.Config(), spec, network)  # by default a member for each environment
    assert {len(x) for x in jax.tree.leaves(jax.eval_shape(every.actor, state).noisy)} == {8}
    act, found = jax.jit(algo.act, static_argnames="explore"), []
    for step in range(2):
        obs = fakes.observations(np.random.default_rng(step), observation, (8,))
        out = act(actor, obs, carry, KEY)
        carry = out.carry
        for i in range(8):
            own = actor.replace(params=jax.tree.map(lambda x, i=i: x[i // 2], actor.noisy))
            expected = act(own, jax.tree.map(lambda x, i=i: x[i : i + 1], obs), alone[i], KEY, explore=False)
            alone[i] = expected.carry
            np.testing.assert_allclose(out.action[i], expected.action[0], rtol=1e-5, atol=1e-6)
        found.append(np.asarray(out.action))
    assert len(np.unique(np.concatenate(found), axis=0)) > 1


# ---------------------------------------------------------------- scores


def plain_scores(rollout, population, alive_bonus=0.0):
    """Mean return of the episodes of each member that ended; of a column without an end its return so far."""
    episodes = [[] for _ in range(population)]
    member = np.asarray(rollout.carry.memory.member)
    for b, number in enumerate(member):
        ended, total = [], 0.0
        for t in range(rollout.reward.shape[0]):
            if rollout.mask[t, b]:
                total += rollout.reward[t, b] - alive_bonus
                if rollout.terminated[t, b] or rollout.truncated[t, b]:
                    ended.append(total)
                    total = 0.0
        episodes[number] += ended or [total]
    return np.array([np.mean(x) for x in episodes]), sum(map(len, episodes))


def test_scores_are_those_of_a_plain_loop_over_episodes():
    spec = fakes.spec(num_envs=8)
    cfg = ars.Config(population=4, alive_bonus=0.3)
    algo, agent = ars.make(cfg, spec, LINEAR), fakes_agent(cfg, spec)
    rollout = fakes.rollout(algo, spec, algo.actor(algo.init(KEY)), T=12)
    endless = np.zeros_like(rollout.mask)
    endless[:, 3] = True  # a column without an end
    rollout = rollout.replace(terminated=rollout.terminated & ~endless, truncated=rollout.truncated & ~endless)
    rollout = jax.device_get(rollout)
    expected, count = plain_scores(rollout, 4, 0.3)
    assert count > 8
    scores, metrics = evolution.member_scores(cfg, agent, rollout)
    np.testing.assert_allclose(scores, expected, rtol=1e-5)
    np.testing.assert_allclose(metrics["members/score_max"], expected.max(), rtol=1e-5)
    # an environment that gives NaN makes its member the worst, and not the population
    reward = np.where((rollout.carry.memory.member == 2)[None] & rollout.mask, np.nan, rollout.reward)
    scores, _ = evolution.member_scores(cfg, agent, rollout.replace(reward=reward))
    np.testing.assert_allclose(scores, np.where(np.arange(4) == 2, np.delete(expected, 2).min(), expected), rtol=1e-5)


def fakes_agent(cfg, spec):
    from jrl.algos import agent as agents

    return agents.make(
        cfg, spec, LINEAR, evolution.make_policy, kind="distribution", records=agents.Records(), axis_name=None
    )


# ---------------------------------------------------------------- steps


def test_the_step_of_ars_is_the_papers():
    """Algorithm 2 of arXiv:1803.07055 for two of three directions."""
    cfg, rng = ars.Config(population=6, noise_std=0.2, top_directions=2), np.random.default_rng(0)
    deltas, scores = rng.normal(size=(3, 5)), np.array([1.0, 0.0, 4.0, 2.0, 0.5, 3.0])
    deviations = 0.2 * np.concatenate([deltas, -deltas])
    plus, minus = scores[:3], scores[3:]
    best = np.argsort(-np.maximum(plus, minus))[:2]
    sigma = np.concatenate([plus[best], minus[best]]).std()
    expected = sum((plus[k] - minus[k]) * deltas[k] for k in best) / (2 * sigma)
    step, own = ars.learn(cfg, {}, jnp.float32(deviations), jnp.float32(scores), jnp.uint32(0))
    np.testing.assert_allclose(step, expected, rtol=1e-5)
    assert own == {}


def test_the_gradient_of_es_is_that_of_centered_ranks():
    cfg, rng = es.Config(population=4, noise_std=0.5), np.random.default_rng(0)
    noise = rng.normal(size=(4, 3))
    utilities = np.array([1 / 6, -0.5, 0.5, -1 / 6])
    step, _ = es.learn(cfg, {}, jnp.float32(0.5 * noise), jnp.array([3.0, -7.0, 100.0, 1.0]), jnp.uint32(0))
    np.testing.assert_allclose(step, utilities @ noise / (4 * 0.5), rtol=1e-5)
    step, _ = es.learn(cfg, {}, jnp.float32(0.5 * noise), jnp.ones(4), jnp.uint32(0))  # equal scores teach nothing
    np.testing.assert_allclose(step, np.zeros(3), atol=1e-7)


def plain_cma(deviations, scores, own, generation, *, diagonal):
    """One generation of CMA-ES in numpy, written from the tutorial's figure 6; returns (step, own)."""
    count, n = deviations.shape
    order = np.argsort(-scores)
    w = np.maximum(0, np.log((count + 1) / 2) - np.log(np.arange(1, count + 1)))
    w /= w.sum()
    mu = 1 / (w**2).sum()
    y = deviations[order] / own["sigma"]
    mean = w @ y
    cs, cc = (mu + 2) / (n + mu + 5), (4 + mu / n) / (n + 4 + 2 * mu / n)
    ds = 1 + 2 * max(0, math.sqrt((mu - 1) / (n + 1)) - 1) + cs
    c1 = 2 / ((n + 1.3) ** 2 + mu) * ((n + 2) / 3 if diagonal else 1)
    cm = min(1 - c1, 2 * (1 / 4 + mu + 1 / mu - 2) / ((n + 2) ** 2 + mu) * ((n + 2) / 3 if diagonal else 1))
    c = np.diag(own["matrix"]) if diagonal else own["matrix"]
    values, vectors = np.linalg.eigh(c)
    inverse_root = vectors @ np.diag(values**-0.5) @ vectors.T
    ps = (1 - cs) * own["path_sigma"] + np.sqrt(cs * (2 - cs) * mu) * inverse_root @ mean
    chi = math.sqrt(n) * (1 - 1 / (4 * n) + 1 / (21 * n**2))
    h = np.linalg.norm(ps) / math.sqrt(1 - (1 - cs) ** (2 * (generation + 1))) < (1.4 + 2 / (n + 1)) * chi
    pc = (1 - cc) * own["path_c"] + h * np.sqrt(cc * (2 - cc) * mu) * mean
    c = (1 - c1 - cm + (1 - h) * c1 * cc * (2 - cc)) * c + c1 * np.outer(pc, pc)
    c = c + cm * sum(w[i] * np.outer(y[i], y[i]) for i in range(count))
    sigma = own["sigma"] * math.exp(cs / ds * (np.linalg.norm(ps) / chi - 1))
    matrix = np.diag(c) if diagonal else c
    return own["sigma"] * mean, {"sigma": sigma, "path_sigma": ps, "path_c": pc, "matrix": matrix}


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_generations_of_cma_es_are_those_of_numpy(covariance):
    cfg, diagonal = cma_es.Config(population=8, covariance=covariance), covariance == "diagonal"
    learn = jax.jit(cma_es.learn)
    own = cma_es.init(cfg, 5)
    plain = {name: np.float64(own[name]) for name in ("sigma", "path_sigma", "path_c", "matrix")}
    for generation in range(4):
        deviations = cma_es.sample(cfg, own, jax.random.fold_in(KEY, generation), 5)
        scores = np.array([deviations[i, 0] - generation * deviations[i, 1] ** 2 for i in range(8)])
        step, own = learn(cfg, own, deviations, jnp.asarray(scores), jnp.uint32(generation))
        expected, plain = plain_cma(np.float64(deviations), scores, plain, generation, diagonal=diagonal)
        np.testing.assert_allclose(step, expected, rtol=1e-4, atol=1e-5)
        for name, x in plain.items():
            np.testing.assert_allclose(own[name], x, rtol=1e-4, atol=1e-5, err_msg=name)


def test_deviations_of_cma_es_have_its_covariance_and_it_finds_the_top_of_an_ellipsoid():
    cfg, size = cma_es.Config(population=12, noise_std=0.5), 6
    scales = jnp.logspace(0, 3, size)

    @jax.jit
    def run(own, keys):
        def generation(carry, x):
            mean, own = carry
            deviations = cma_es.sample(cfg, own, x[0], size)
            scores = -jnp.sum(scales[None] * (mean[None] + deviations) ** 2, 1)
            step, own = cma_es.learn(cfg, own, deviations, scores, x[1])
            return (mean + step, own), None

        start = jnp.ones(size), own
        return jax.lax.scan(generation, start, (keys, jnp.arange(len(keys), dtype=jnp.uint32)))[0]

    mean, own = run(cma_es.init(cfg, size), jax.random.split(KEY, 250))
    assert jnp.sum(scales * mean**2) < 1e-8  # from 1.3e3
    many = cma_es.Config(population=100_000)
    found = np.cov(np.asarray(cma_es.sample(many, own, KEY, size)).T) / float(own["sigma"]) ** 2
    root = np.sqrt(np.diag(own["matrix"]))
    np.testing.assert_allclose(found / np.outer(root, root), own["matrix"] / np.outer(root, root), atol=0.03)


# ---------------------------------------------------------------- runs


@pytest.mark.parametrize("backend", ["jax", "gymnasium"])
def test_each_rollout_begins_new_episodes(backend):
    env = envs.make(EnvConfig(id="CartPole-v1", num_envs=4, backend=backend), seed=0)
    algo = ars.make(ars.Config(population=4, noise_std=0.1), env.spec, LINEAR)
    state = algo.init(KEY)
    actor = algo.actor(state)
    if backend == "jax":
        source = unroll.make(env, algo.act, length=30, carry=algo.carry, restart=True)
        columns, step = source.init(KEY), jax.jit(source.step)
    else:
        host = HostCollector(env, algo.act, length=30, carry=algo.carry, restart=True)
    counted = 0
    for i in range(2):
        key = jax.random.fold_in(KEY, i)
        if backend == "jax":
            columns, rollout, report = step(columns, actor, key)
        else:
            rollout, report = host.next(actor, key)
        assert np.asarray(rollout.mask)[0].all() and not np.asarray(rollout.contiguous).any()
        assert np.abs(rollout.obs[0]).max() <= 0.05 < np.abs(rollout.last_obs).max()
        counted += int((rollout.terminated | rollout.truncated).sum())
    window = np.asarray(report.window_length)
    window = window[np.isfinite(window)]
    assert len(window) == counted and (window <= 30).all()  # no episode goes on across the reset
    env.close()


SMALL = ["env.id=test_evolution:hill", "env.backend=jax", "env.num_envs=8", "rollout.length=9", "network.hidden=[]"]
SMALL += ["run.log=[]", "run.report_every=72", "algo.population=4", "algo.noise_std=0.2"]


def trained(algo, *settings, steps=720):
    cfg = config.load(None, [*SMALL, *settings], algo=algo, stop=[f"env_steps={steps}"])
    with Session(cfg) as session:
        session.start()
        while session.advance():
            pass
        return jax.device_get(session.parts()["learner"]), session


@pytest.mark.parametrize("name", some_quick(MODULES, "ars"))
def test_a_population_on_two_devices_learns_what_one_learns(name):
    """Without chance in the environment; the mean's action climbs towards 1/2."""
    one, two = (trained(name, "algo.lr=0.3", f"devices.fake={n}")[0] for n in (1, 2))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), one.params, two.params)
    algo = MODULES[name].make(MODULES[name].Config(population=4), EnvSpec(Box((1,)), Box((1,)), 8), LINEAR)
    action = algo.outputs(one.replace(obs_stats=()) if name == "cma_es" else one, jnp.arange(4.0)[:, None])
    assert np.mean((np.asarray(action["distribution"].mode()) - 0.5) ** 2) < 0.1  # from 0.25
    assert int(one.updates) > 5


@pytest.mark.slow
def test_ars_balances_the_pole(tmp_path):
    """The YAML that ships, from the host and from the program."""
    for backend in ("jax", "gymnasium"):
        more = [f"--set=env.backend={backend}", "--set=evaluation.every=8000", "--set=evaluation.duration=10"]
        out = tmp_path / backend
        assert train.main(["configs/ars.yaml", *more, "--stop=evaluation/return=300", f"--out={out}", "--as-test"]) == 0


# ---------------------------------------------------------------- refusals


def test_a_full_matrix_of_many_parameters_and_a_loss_are_refused():
    spec, many = EnvSpec(Box((20,)), Box((4,)), 8), NetworkConfig(hidden=(64,))
    with pytest.raises(InputError, match=r"covariance full: expected at most 1000 parameters, got 1604: set algo\.cov"):
        cma_es.make(cma_es.Config(), spec, many)
    cma_es.make(cma_es.Config(covariance="diagonal"), spec, many)
    for module in MODULES.values():
        with pytest.raises(InputError, match=r"custom\.loss: .* leave it out"):
            module.make(module.Config(), spec, LINEAR, loss=lambda default, net, params, batch: default(params, batch))
