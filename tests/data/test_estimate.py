"""How good a policy is, by episodes that others played: the command, estimates beside training, and what is refused."""

import json
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tabular

import jrl
from jrl import config, data, train
from jrl.algos import dqn, fqe, ppo, sac, td3
from jrl.algos.exploration import EpsilonGreedy, OrnsteinUhlenbeck, SoftQ
from jrl.api import BCConfig
from jrl.data.__main__ import main
from jrl.errors import InputError
from jrl.fields.hyper import Lstm, NoCore
from jrl.networks import NetworkConfig
from jrl.ops import estimators
from jrl.play import action_probabilities
from jrl.run import estimate_data, estimates
from jrl.run.session import Session
from jrl.types import Batch, Box, Dict, Discrete, EnvSpec, MultiDiscrete

GAMMA = 0.9
VECTOR, TWO = Box((3,)), Discrete(2)
MASKED = Dict((("action_mask", Box((3,), "bool", 0.0, 1.0)), ("obs", VECTOR)))
PLANE = Box((2,), "float32", -1.0, 1.0)


def store(action=TWO, *, observation=VECTOR, episodes=40, seed=0, log_prob=None):
    """Episodes of one to six steps of a policy that takes each action as often, rewarded by their first observation."""
    rng, found = np.random.default_rng(seed), []
    for e in range(episodes):
        steps = int(rng.integers(1, 7))
        obs = rng.normal(size=(steps + 1, 3)).astype(np.float32)
        taken = rng.uniform(-1, 1, (steps, 2)).astype(np.float32)
        match action:
            case Discrete():
                taken = rng.integers(0, action.n, steps)
            case MultiDiscrete():
                taken = rng.integers(0, action.nvec, (steps, 2))
            case Dict():
                taken = {"aim": taken, "move": rng.integers(0, 3, steps)}
        mask = np.ones((steps + 1, 3), bool)
        mask[:, 2] = rng.random(steps + 1) < 0.5
        rows = {"log_prob": np.full(steps, np.log(0.5) if log_prob is None else log_prob, np.float32)}
        seen = {"action_mask": mask, "obs": obs} if isinstance(observation, Dict) else obs
        found.append(data.Episode(seen, taken, obs[:-1, 0] + 1, e % 2 == 0, e % 2 == 1, rows))
    return data.of_episodes(observation, action, found)


def run_config(path, *overrides):
    base = {
        "algo": {"name": "dqn", "gamma": GAMMA}, "data": {"input": str(path)}, "replay": {"batch_size": 32},
        "network": {"hidden": [8]}, "run": {"compile_cache": False, "log": ["jsonl"]}, "stop": {"updates": 40},
    }  # fmt: skip
    return config.override(config.merge(base, {}), overrides)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run, and the data that it learned from."""
    root = tmp_path_factory.mktemp("trained")
    data.write(store(), root / "data")
    config.write(run_config(root / "data"), root)
    assert train.main([str(root / "config.yaml"), "--out", str(root / "run")]) == 0
    return root / "run", root / "data"


# ---------------------------------------------------------------- the command


def test_the_command_weighs_the_episodes_by_what_the_policy_does(trained, capsys):
    run, path = trained
    assert main(["estimate", str(run), str(path), "--methods", "is,wis", "--gamma", "0.5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    policy, held = jrl.load(run), store()
    weights, returns = [], []
    for episode in held.episodes():
        same = policy.act(episode.obs[:-1]) == episode.action
        weights.append(np.prod(np.where(same, 2.0, 0.0)))
        returns.append(episode.reward @ 0.5 ** np.arange(len(episode.reward)))
    weights, returns = np.array(weights), np.array(returns)
    assert 0 < (weights > 0).mean() < 1
    np.testing.assert_allclose(found["estimates"]["is"]["value"], (weights * returns).mean(), rtol=1e-5)
    np.testing.assert_allclose(found["estimates"]["wis"]["value"], weights @ returns / weights.sum(), rtol=1e-5)
    np.testing.assert_allclose(found["ess"], weights.sum() ** 2 / (weights**2).sum(), rtol=1e-5)
    np.testing.assert_allclose(found["mean_return"], returns.mean(), rtol=1e-5)
    assert found["gamma"] == 0.5 and found["judged"] == "its best actions"


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        ({"columns": {}}, [], r"no column log_prob.*is, wis, pdis, dr need: record the data with jrl .*--methods dm"),
        ({"log_prob": 0.5}, [], r"above 0 in .*no probability is above 1: store the logarithm"),
        ({"log_prob": -np.inf}, ["--methods", "wis"], r"log_prob: [\d]+ numbers not finite .*wis needs them"),
        ({"action": Discrete(5)}, [], r"actions: expected Discrete\(n=2.*, got [2-4] in \d+ rows?, first in episode"),
        ({"action": PLANE}, [], r"has actions Box.*where the environment has Discrete.*: give data of the env"),
        ({}, ["--methods", "is,magic"], r"--methods: magic: expected one of is, wis"),
        ({}, ["--gamma", "2"], r"--gamma: expected a number in \[0, 1\], got 2"),
        ({}, ["--episodes", "0"], r"--episodes: expected at least 1"),
        ({}, ["--policy", "red"], r"the run has one agent, leave it out"),
    ],
)
def test_what_cannot_be_estimated_is_one_clear_error(trained, tmp_path, capsys, change, arguments, message):
    columns = change.pop("columns", None) if (change := dict(change)) else None
    held = store(**change)
    if columns is not None:
        held.columns.clear()
    data.write(held, tmp_path / "other")
    assert main(["estimate", str(trained[0]), str(tmp_path / "other"), *arguments]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1 and re.search(message, errors[0]), errors


def test_probabilities_in_the_place_of_their_logarithms_are_told():
    held = store()
    held.columns["log_prob"][:] = np.linspace(0.1, 0.9, held.num_rows)
    with pytest.raises(InputError, match="they are probabilities: take their logarithm; or judge without: X"):
        estimates.check_log_probs(held, ["is"], "X")
    density = store(PLANE)
    density.columns["log_prob"][:] = np.linspace(0.1, 0.9, density.num_rows)
    with pytest.raises(InputError, match="they are probabilities"):
        estimates.check_log_probs(density, ["is"], "X")


def judge(module, cfg, action, held=None, **how):
    """Of a fresh algorithm, with its actor."""
    spec, network = EnvSpec(VECTOR, action, 1), NetworkConfig(hidden=(8,))
    algo = module.make(cfg, spec, network)
    settings = {"methods": ["wis"], **how}
    whole = run_config("x", f"data.estimate={json.dumps(settings)}")
    held, how = store(action) if held is None else held, whole.data.estimate
    made = estimates.ReturnEstimator(whole.algo.gamma, whole.network, how, algo, spec, held)
    return made, first_actor(algo, 0)


def first_actor(algo, seed):
    """The actor of an algorithm as it begins, by one program."""
    return jax.jit(lambda key: algo.actor(algo.init(key)))(jax.random.key(seed))


@pytest.mark.slow
def test_one_action_of_a_continuum_has_no_weight():
    with pytest.raises(InputError, match=r"^wis: .*expected a policy with action prob.*methods=\[dm\].*explore=true$"):
        judge(td3, td3.Config(), PLANE)
    with pytest.raises(InputError, match=r"got the mode of a density"):
        judge(sac, sac.Config(), PLANE, explore=False)
    with pytest.raises(InputError, match=r"ornstein_uhlenbeck: the probability"):
        judge(td3, td3.Config(exploration=OrnsteinUhlenbeck()), PLANE, explore=True)
    bare = store(PLANE)
    bare.columns.clear()  # fitted values need no probabilities
    made, actor = judge(td3, td3.Config(), PLANE, bare, methods=["dm"], fqe={"updates": 5})
    found = made(actor, jax.random.key(0))
    assert np.isfinite(found.estimates["dm"]["value"]) and found.ess is None
    lines = estimate_data.table(found)
    assert lines[2].startswith("dm ") and not any("effective sample size" in line for line in lines)
    made, actor = judge(td3, td3.Config(), PLANE, explore=True)  # with normal noise it has a density
    assert np.isfinite(made(actor, jax.random.key(0)).estimates["wis"]["value"])


def test_weights_that_explode_are_warned_of():
    held = store(log_prob=-8.0)
    report = judge(dqn, dqn.Config(), Discrete(2), held)
    found = report[0](report[1], jax.random.key(0))
    assert any("weights explode" in text for text in found.warnings)
    assert any("where 1 is expected" in text for text in found.warnings)
    assert all(np.isfinite(list(found.metrics().values())))


# ---------------------------------------------------------------- along episodes


@pytest.mark.parametrize(
    ("action", "observation", "core"),
    [
        (Discrete(3), MASKED, Lstm(size=8)),
        pytest.param(MultiDiscrete((2, 3)), VECTOR, NoCore(), marks=pytest.mark.slow),
        pytest.param(Dict((("aim", PLANE), ("move", Discrete(3)))), VECTOR, Lstm(size=8), marks=pytest.mark.slow),
    ],
)
def test_probabilities_are_those_of_acting_step_by_step(action, observation, core):
    """Of each episode on its own, with the memory that acting hands on."""
    spec = EnvSpec(observation, action, 1)
    algo = ppo.make(ppo.Config(), spec, NetworkConfig(hidden=(8,), core=core))
    actor = first_actor(algo, 0)
    held = store(action, observation=observation)
    found = action_probabilities.compute_probabilities(
        algo, spec, actor, held, action_probabilities.ProbabilityRequest(True, True, 2), jax.random.key(1)
    )
    choose = jax.jit(lambda obs, carry: algo.choice(actor, obs, carry, True))
    row = 0
    for episode in held.take(np.arange(4)).episodes():
        carry = algo.carry(1)
        for t in range(len(episode.reward)):
            at = lambda tree, t=t: jax.tree.map(lambda x: x[t : t + 1], tree)
            dist, carry = choose(at(episode.obs), carry)
            np.testing.assert_allclose(found.log_prob[row + t], dist.log_prob(at(episode.action))[0], rtol=1e-4)
            if isinstance(action, Discrete):
                np.testing.assert_allclose(found.choices[row + t], jax.nn.softmax(dist.logits[0]), rtol=1e-4, atol=1e-7)
        row += len(episode.reward) + 1
    if isinstance(action, Discrete):
        np.testing.assert_allclose(found.choices.sum(1), 1, rtol=1e-5)
        forbidden = ~held.obs["action_mask"]
        assert forbidden.any() and (found.choices[forbidden] == 0).all()
    else:
        assert found.choices.shape == (held.num_rows, 2, 5)


@pytest.mark.parametrize(
    ("exploration", "explore"),
    [(EpsilonGreedy(epsilon=0.4), True), (EpsilonGreedy(epsilon=0.4), False), (SoftQ(temperature=0.5), True),
     (SoftQ(temperature=0.0), True)],
)  # fmt: skip
def test_the_distribution_of_choices_is_that_of_acting(exploration, explore):
    spec = EnvSpec(MASKED, Discrete(3), 1)
    algo = dqn.make(dqn.Config(exploration=exploration), spec, NetworkConfig(hidden=(8,)))
    actor = first_actor(algo, 0)
    obs = {"action_mask": jnp.array([[True, True, True], [True, True, False]]), "obs": jnp.ones((2, 3))}
    dist, _ = algo.choice(actor, obs, algo.carry(2), explore)
    act = jax.jit(jax.vmap(lambda key: algo.act(actor, obs, algo.carry(2), key, explore).action))
    drawn = np.asarray(act(jax.random.split(jax.random.key(1), 4000)))
    share = np.stack([(drawn == a).mean(0) for a in range(3)], 1)
    np.testing.assert_allclose(np.exp(jax.nn.log_softmax(dist.logits)), share, atol=0.03)


# ---------------------------------------------------------------- fitted values


@pytest.mark.parametrize("choices", [pytest.param("of a continuum", marks=pytest.mark.slow), "of two"])
def test_fitted_values_are_those_of_the_policy(choices):
    """r = s + a, s' = s / 2, discount 0.5: of a policy of mean action 0.4 V(s) = (4 s + 2.4) / 3."""
    discrete = choices == "of two"
    action = Discrete(2) if discrete else Box((1,), "float32", -1.0, 1.0)
    spec = EnvSpec(Box((1,)), action, 1)
    settings = fqe.Settings(updates=1500, lr=1e-2, tau=0.1, hidden=(32,))
    made = fqe.make(spec, NetworkConfig(activation="tanh"), settings, level=0.5, scale=1.0)
    chosen = jnp.array([0.6, 0.4]) if discrete else jnp.array([[0.2], [0.6]])  # of actions worth 0 and 1, or themselves
    many = lambda n: jnp.broadcast_to(chosen[None], (n, *chosen.shape))

    def batch(key):
        s, a = jax.random.uniform(key, (2, 128), minval=-1)
        a = (a > 0).astype(jnp.int32) if discrete else a[:, None]
        worth = a if discrete else a[:, 0]
        ones = jnp.ones(128)
        return Batch(s[:, None], a, s + worth, 0.5 * ones, s[:, None] / 2, ones, ones.astype(jnp.int32),
                     {fqe.NEXT: many(128)})  # fmt: skip

    @jax.jit
    def fit(key):
        first = batch(key)
        state = made.observe(made.init(key), first.obs[:, None], jnp.ones((128, 1), bool))
        state, losses = jax.lax.scan(
            lambda state, key: made.update(state, batch(key)), state, jax.random.split(key, 1500)
        )
        s = jnp.linspace(-0.9, 0.9, 7)
        taken = jnp.ones(7, jnp.int32) if discrete else jnp.full((7, 1), 0.5)
        return s, losses, *made.values(state, s[:, None], taken, many(7))

    s, losses, q, v = fit(jax.random.key(0))
    assert losses[-1] < 1e-3 < losses[0]
    expected = (4 * s + 2.4) / 3
    np.testing.assert_allclose(v, expected, atol=0.06)
    np.testing.assert_allclose(q, s + (1.0 if discrete else 0.5) + 0.5 * (2 * s + 2.4) / 3, atol=0.06)


# ---------------------------------------------------------------- processes of known values


CLEVER = np.array([[0.35, 0.65]] * 3)  # it takes the better of the two actions more often


def episodes_of_the_chain(num=2000):
    """In `tabular.chain`, where a state is one of three bits, by CLEVER; ends are true."""
    process = tabular.as_jax(tabular.chain()._replace(mu=CLEVER))
    state, action, reward, mask, _ = map(np.asarray, tabular.played(process, jax.random.key(1), num, 50))
    seen, found = np.eye(3, dtype=np.float32)[state], []
    for e, steps in enumerate(mask.sum(1)):
        acted = state[e, :steps], action[e, :steps]
        told = {"log_prob": np.log(process.mu)[acted].astype(np.float32)}
        found.append(data.Episode(seen[e, : steps + 1], acted[1], reward[e, :steps], True, False, told))
    return data.of_episodes(Box((3,)), TWO, found)


def verdict(spec, held, methods, change, fqe):
    """What is said of a policy of PPO whose weights are changed, and the policy: (algo, actor)."""
    algo = ppo.make(ppo.Config(gamma=tabular.GAMMA), spec, NetworkConfig(hidden=(8,)))
    actor = jax.tree.map(change, first_actor(algo, 3))
    cfg = run_config("x", f"data.estimate={json.dumps({'methods': methods, 'fqe': fqe})}")
    assert cfg.algo.gamma == tabular.GAMMA
    judge = estimates.ReturnEstimator(cfg.algo.gamma, cfg.network, cfg.data.estimate, algo, spec, held)
    return judge(actor, jax.random.key(0)), algo, actor


@pytest.mark.slow
def test_fitted_values_and_doubly_robust_ones_are_those_of_a_linear_solve():
    spec = EnvSpec(Box((3,)), TWO, 1)
    fit = {"updates": 1500, "batch_size": 128, "lr": 5e-3, "tau": 0.05, "hidden": [16]}
    methods = ["pdis", "dm", "dr"]
    found, algo, actor = verdict(spec, episodes_of_the_chain(), methods, lambda x: 4 * x, fit)
    logits = algo.choice(actor, jnp.eye(3), algo.carry(3), True)[0].logits
    process = tabular.chain()._replace(pi=np.asarray(jax.nn.softmax(logits), np.float64))
    truth = float(process.begin @ tabular.values(process, process.pi)[1])
    behaviour = float(process.begin @ tabular.values(process, CLEVER)[1])
    given = found.estimates
    assert abs(behaviour - truth) > 0.2  # another number
    for name in ("pdis", "dr"):
        assert abs(given[name]["value"] - truth) <= 3 * given[name]["error"], (truth, found)
    # the interval of dm knows nothing of the fit, whose error is about that of dr
    assert abs(given["dm"]["value"] - truth) <= 3 * given["dr"]["error"] + 0.03, (truth, found)
    assert given["dr"]["error"] < given["pdis"]["error"]


# ---------------------------------------------------------------- beside training


def rows(cfg, saved=None):
    """The result rows of a run, and the Session."""
    found = []
    with Session(cfg, sinks=[lambda row: found.append(dict(row))]) as session:
        session.start(saved)
        while info := session.advance():
            session.finish_call(info)
        session.reporter.flush()
    return found


@pytest.mark.slow
def test_estimates_stand_in_rows_and_follow_from_the_weights_and_the_iteration(tmp_path):
    data.write(store(), tmp_path / "set")
    how = {"methods": ["wis", "dr"], "every": 30, "fqe": {"updates": 20, "hidden": [8]}}
    every = ("run.report_every=10", "stop.updates=60")
    given = run_config(tmp_path / "set", f"data.estimate={json.dumps(how)}", "data.validation=0.3", *every)
    with pytest.warns(RuntimeWarning, match="data.estimate: "):
        found = rows(given)
    names = {f"estimate/{name}{end}" for name in how["methods"] for end in ("", "_low", "_high")}
    by_steps = {row["env_steps"]: {k: v for k, v in row.items() if k.startswith("estimate/")} for row in found}
    assert by_steps[10] == {} and by_steps[30].keys() == names | {"estimate/ess", "estimate/return"}
    assert all(np.isfinite(list(by_steps[60].values()))) and by_steps[30] != by_steps[60]
    assert by_steps[40] == by_steps[30]  # the latest
    with pytest.warns(RuntimeWarning, match="data.estimate: "):
        again = rows(given)
    assert {k: v for k, v in again[-1].items() if k.startswith("estimate/")} == by_steps[60]
    held = store().split(0.3, given.run.seed)[1]
    mask = np.arange(6)[None] < held.lengths()[:, None]
    reward = np.zeros((held.num_episodes, 6), np.float32)
    reward[mask] = held.reward[held.is_step()]
    np.testing.assert_allclose(by_steps[60]["estimate/return"], estimators.returns(reward, mask, GAMMA), rtol=1e-5)


@pytest.mark.parametrize(
    "env", [pytest.param("CartPole-v1", marks=pytest.mark.slow), pytest.param(None, marks=pytest.mark.slow)]
)
def test_estimates_that_rllibs_word_asks_for_come_with_each_evaluation(tmp_path, env):
    """Under `evaluation`, by RLlib's names; without an environment they are all that an evaluation is."""
    main(["record", "--env", "CartPole-v1", "--random", "1", "--steps", "150", "--out", str(tmp_path / "set")])
    cfg = BCConfig().environment(env) if env else BCConfig()
    cfg.offline_data(input_=str(tmp_path / "set")).training(train_batch_size=16, model={"fcnet_hiddens": [8]})
    cfg.evaluation(
        evaluation_interval=2, evaluation_duration=3,
        off_policy_estimation_methods={"is": {"type": "is"}, "mine": {"type": "WeightedImportanceSampling"}},
    )  # fmt: skip
    with warnings.catch_warnings(), cfg.build() as algo:
        warnings.simplefilter("ignore")  # a random policy's data hardly have what another does
        first, second, third = (algo.train().get("evaluation", {}) for _ in range(3))
        now = algo.evaluate()
    assert "off_policy_estimator" not in first and ("episode_return_mean" in second) == bool(env)
    found = second["off_policy_estimator"]
    assert third["off_policy_estimator"] == found and now["off_policy_estimator"] != found
    for name in ("is", "wis"):
        assert found[name]["v_target_low"] <= found[name]["v_target"] <= found[name]["v_target_high"]
        assert found[name]["v_behavior"] > 0
    assert "returns" not in second and "lengths" not in second


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.estimate={methods: []}"], "data.estimate.methods: expected at least one method, got none"),
        (["data.estimate={}", "data.input={sampler: 0.5, x: 0.5}", "env.id=CartPole-v1"], "for runs that learn from"),
        (["data.estimate={methods: [magic]}"], "one of is, wis, pdis"),
    ],
)
def test_settings_that_cannot_be_are_named(overrides, message):
    with pytest.raises(InputError, match=message):
        run_config("x", *overrides)
