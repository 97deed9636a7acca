"""Critics with atoms, without target networks, and with resets: against numbers, plain loops and numpy."""

import dataclasses
import itertools
import math

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import some_quick
from sac_reference import forward, one

from jrl.algos import critic_heads, critics
from jrl.algos.critic_heads import Critic
from jrl.algos.critics import Resets
from jrl.ops import distributional
from jrl.types import Discrete

KEY = jax.random.key(4)
N = 24
C51 = Critic(kind="c51", atoms=5, value_range=(-2.0, 2.0))
HL_GAUSS = Critic(kind="hl_gauss", atoms=6, value_range=(-3.0, 3.0))
QUANTILES = Critic(kind="quantiles", atoms=4, dropped_atoms=1)


# ---------------------------------------------------------------- heads, with numbers


def huber_of_quantiles(quantiles, target):
    """Mean over quantiles and targets of |level - 1(error < 0)| huber(error)."""
    total = 0.0
    for i, quantile in enumerate(quantiles):
        for y in target:
            error, level = y - quantile, (i + 0.5) / len(quantiles)
            huber = 0.5 * error**2 if abs(error) <= 1 else abs(error) - 0.5
            total += abs(level - (error < 0)) * huber
    return total / len(quantiles) / len(target)


def test_quantiles_pool_all_critics_without_the_largest():
    head = critic_heads.make(Critic(kind="quantiles", atoms=3, dropped_atoms=1))
    pooled = head.pool(jnp.array([[[1.0, 9.0, 3.0]], [[10.0, 2.0, 4.0]]]))
    pooled = jnp.sort(pooled)
    np.testing.assert_array_equal(pooled, [[1.0, 2.0, 3.0, 4.0]])
    one, bonus = jnp.ones((1, 1)), jnp.full((1, 1), 2.0)
    target = head.backup(pooled[:, None], one, bonus, jnp.array([1.0]), jnp.array([0.5]))
    np.testing.assert_array_equal(target, [[2.5, 3.0, 3.5, 4.0]])
    quantiles = jnp.array([[0.0, 3.2, 9.0]])
    np.testing.assert_allclose(head.loss(quantiles, target), [huber_of_quantiles(*quantiles, *target)], rtol=1e-6)


@pytest.mark.parametrize("dropped", [2, 9])  # 4 atoms are removed one by one, for 18 they are sorted
@pytest.mark.parametrize("num_actions", [1, 3])
def test_quantiles_pool_many_atoms_with_ties(dropped, num_actions):
    atoms = np.random.default_rng(0).integers(-4, 4, (2, 30, num_actions, 10)).astype(np.float32)
    pooled = critic_heads.make(Critic(kind="quantiles", atoms=10, dropped_atoms=dropped)).pool(jnp.asarray(atoms))
    kept = np.sort(np.concatenate(atoms, -1))[..., : 20 - 2 * dropped]
    np.testing.assert_array_equal(np.sort(pooled), kept)
    if num_actions > 1:  # targets mix the atoms of one rank
        np.testing.assert_array_equal(pooled, kept)


def test_c51_takes_the_critic_of_the_least_mean():
    head = critic_heads.make(Critic(kind="c51", atoms=3, value_range=(0.0, 2.0)))
    low, high = jnp.log(jnp.array([0.5, 0.25, 0.25])), jnp.log(jnp.array([0.1, 0.1, 0.8]))
    outputs = jnp.stack([jnp.stack([low, high]), jnp.stack([high, low])])  # two critics, two rows
    np.testing.assert_allclose(head.mean(outputs), [[0.75, 1.7], [1.7, 0.75]], rtol=1e-6)
    np.testing.assert_array_equal(head.pool(outputs), [low, low])
    one = jnp.ones((2, 1))
    target = head.backup(head.pool(outputs)[:, None], one, 0.5 * one, jnp.array([0.0, 9.0]), jnp.array([1.0, 0.5]))
    # atoms 0.5, 1.5 and 2.5, whose bound is 2; the second row is beyond the bound
    np.testing.assert_allclose(target, [[0.25, 0.375, 0.375], [0.0, 0.0, 1.0]], atol=1e-6)


def histogram(value, low, high, bins):
    """Probabilities of bins under a normal distribution, of error functions."""
    width = (high - low) / bins
    cdf = [0.5 * math.erf((low + i * width - value) / (0.75 * width * math.sqrt(2))) for i in range(bins + 1)]
    return [(b - a) / (cdf[-1] - cdf[0]) for a, b in itertools.pairwise(cdf)]


def test_hl_gauss_is_the_cross_entropy_from_a_histogram():
    head = critic_heads.make(HL_GAUSS)
    value, outputs = jnp.array([0.4, 7.0]), jnp.array([[0.1, 0.5, -1.0, 2.0, 0.0, 0.3]] * 2)
    probs = np.exp(outputs[0]) / np.exp(outputs[0]).sum()
    np.testing.assert_allclose(head.mean(outputs)[0], np.dot(probs, [-2.5, -1.5, -0.5, 0.5, 1.5, 2.5]), rtol=1e-5)
    want = [histogram(x, -3.0, 3.0, 6) for x in (0.4, 3.0)]
    made = distributional.gaussian_histogram(value, low=-3.0, high=3.0, num_bins=6)
    np.testing.assert_allclose(made, want, atol=1e-6)
    np.testing.assert_allclose(head.loss(outputs, value), [-np.dot(w, np.log(probs)) for w in want], rtol=1e-5)
    best = jax.grad(lambda x: head.loss(x, value).sum())(jnp.log(jnp.array(want)))
    np.testing.assert_allclose(best, 0.0, atol=1e-6)


# ---------------------------------------------------------------- one update


def setting(name, action, network=fakes.NETWORK, **overrides):
    """(algo, state with targets away from the critics, batch)"""
    spec = fakes.spec(action, name=name)
    algo = fakes.make(name, spec, network, gamma=0.9, **overrides)
    state = fakes.perturbed(fakes.made_up_state(algo))
    if state.target_params:
        moved = fakes.perturbed(state.replace(params=state.target_params), 0.5).params
        state = state.replace(target_params=moved)
    return algo, state, fakes.batch(algo, spec, algo.actor(state), N=N)


def outputs_of(critic, obs, action):
    """[C, N, K] of a Box, [C, N, A, K] of three Discrete actions."""
    x = obs if action is None else jnp.concatenate([obs, action], -1)
    y = np.stack([forward(one(critic, i), x) for i in range(len(jax.tree.leaves(critic)[0]))]).astype(np.float64)
    return y if action is not None else y.reshape(*y.shape[:2], 3, -1)


def next_actions(name, state, batch, discrete):
    """[(action [N, *] or None, probability [N], bonus [N])] of the policy at next_obs, one for each action."""
    if name == "td3":
        action = np.tanh(forward(state.target_params["actor"], batch.next_obs))
        drawn = np.clip(0.2 * critics.noise(KEY, *action.shape[:1], action.shape[1:], None), -0.5, 0.5)
        return [(np.clip(action + drawn, -1, 1), np.ones(N), np.zeros(N))]
    out, ent_coef = forward(state.params["actor"], batch.next_obs), float(jnp.exp(state.params["log_ent_coef"]))
    if discrete:
        prob = np.exp(out) / np.exp(out).sum(-1, keepdims=True)
        return [(None, prob[:, a], -ent_coef * np.log(prob[:, a])) for a in range(3)]
    mean, log_std = np.split(np.asarray(out, np.float64), 2, -1)
    noise = critics.noise(KEY, N, (2, *fakes.BOX.shape), None)[:, 0]
    before = mean + np.exp(log_std) * noise
    density = np.exp(-0.5 * noise**2) / np.exp(log_std) / math.sqrt(2 * math.pi)
    log_prob = np.log(density / (1 - np.tanh(before) ** 2)).sum(-1)
    return [(np.tanh(before), np.ones(N), -ent_coef * log_prob)]


def softmax(x):
    return np.exp(x) / np.exp(x).sum(-1, keepdims=True)


def value_of(cfg, outputs):
    """Expected return of outputs [..., K]."""
    if cfg.kind == "quantiles":
        return outputs.mean(-1)
    low, high = cfg.value_range
    atoms = np.linspace(low, high, cfg.atoms)
    if cfg.kind == "hl_gauss":
        width = (high - low) / cfg.atoms
        atoms = np.linspace(low + width / 2, high - width / 2, cfg.atoms)
    return softmax(outputs) @ atoms


def row_target(cfg, after, reward, discount):
    """Target of one transition, of a list of (outputs [C, K] of an action, probability, bonus)."""
    if cfg.kind == "quantiles":
        kept = [np.sort(x.reshape(-1))[: len(x) * (cfg.atoms - cfg.dropped_atoms)] for x, _, _ in after]
        return reward + discount * sum(p * (x + b) for x, (_, p, b) in zip(kept, after, strict=True))
    if cfg.kind == "hl_gauss":
        return reward + discount * sum(p * (value_of(cfg, x).min() + b) for x, p, b in after)
    grid, mass = np.linspace(*cfg.value_range, cfg.atoms), np.zeros(cfg.atoms)
    for x, p, b in after:
        probs = softmax(x[value_of(cfg, x).argmin()])
        for atom, share in zip(grid, probs, strict=True):
            at = np.clip(reward + discount * (atom + b), *cfg.value_range)
            for k in range(cfg.atoms):
                mass[k] += p * share * max(0.0, 1.0 - abs(at - grid[k]) / (grid[1] - grid[0]))
    return mass


def row_loss(cfg, outputs, target):
    """(loss, TD error) of outputs [K]; the error that becomes the priority."""
    if cfg.kind == "quantiles":
        return huber_of_quantiles(outputs, target), outputs.mean() - target.mean()
    log_probs = np.log(softmax(outputs))
    if cfg.kind == "hl_gauss":
        clipped = np.clip(target, *cfg.value_range)
        return -np.dot(histogram(clipped, *cfg.value_range, cfg.atoms), log_probs), value_of(cfg, outputs) - target
    kl = sum(p * (math.log(p) - q) for p, q in zip(target, log_probs, strict=True) if p > 0)
    return kl, kl


CRITICS = {critic.kind: critic for critic in (QUANTILES, C51, HL_GAUSS)}
UPDATES = [(*case, kind) for kind in CRITICS for case in (("sac", "box"), ("sac", "discrete"), ("td3", "box"))]


@pytest.mark.parametrize(
    ("name", "action", "kind"), some_quick(UPDATES, ("sac", "box", "quantiles"), ("td3", "box", "c51"))
)
def test_one_update_by_loops(name, action, kind):
    discrete, cfg, action = action == "discrete", CRITICS[kind], Discrete(3) if action == "discrete" else fakes.BOX
    algo, state, batch = setting(name, action, critic=cfg)
    after, aux = jax.jit(algo.update)(state, batch, KEY)
    weight, target_critic = np.asarray(batch.weight), state.target_params["critic"]
    chosen = next_actions(name, state, batch, discrete)
    ahead = [outputs_of(target_critic, batch.next_obs, a) for a, _, _ in chosen]
    ahead = [x[:, :, i] if discrete else x for i, x in enumerate(ahead)]
    now = outputs_of(state.params["critic"], batch.obs, None if discrete else batch.action)
    now = now[:, np.arange(N), batch.action] if discrete else now
    losses, errors, targets = np.zeros((2, N)), np.zeros((2, N)), []
    for n in range(N):
        rows = [(x[:, n], p[n], b[n]) for x, (_, p, b) in zip(ahead, chosen, strict=True)]
        target = row_target(cfg, rows, float(batch.reward[n]), float(batch.discount[n]))
        mean = np.dot(target, np.linspace(*cfg.value_range, cfg.atoms)) if cfg.kind == "c51" else np.mean(target)
        targets.append(mean)
        for c in range(2):
            losses[c, n], errors[c, n] = row_loss(cfg, now[c, n], target)
    valid = weight > 0
    want = {
        "loss/value": (weight * losses)[:, valid].sum() / 2 / N,
        "value/q": (weight * value_of(cfg, now).mean(0)).sum() / N,
        "value/target": (weight * targets)[valid].sum() / N,
    }
    for key, value in want.items():
        np.testing.assert_allclose(aux.metrics[key], value, rtol=1e-4, atol=1e-5, err_msg=key)
    np.testing.assert_allclose(aux.priority, np.where(valid, np.abs(errors).mean(0), 0.0), rtol=1e-3, atol=1e-5)
    assert fakes.differ(after.params["critic"], state.params["critic"])


# ---------------------------------------------------------------- without target networks

NORMED = dataclasses.replace(fakes.NETWORK, norm="batch_renorm", norm_after_activation=True)


def normalized_forward(params, x, valid):
    """[N] of one critic with the statistics of the valid rows; and the mean of what each norm reads, by its name."""
    params, means = jax.device_get(params), {}
    layers = params["layers"]

    def normalize(x, name):
        means[name], std, norm = x[valid].mean(0), np.sqrt(x[valid].var(0) + 1e-3), layers[name]
        return (x - means[name]) / std * norm["scale"] + norm["bias"]

    x = normalize(x, "input_norm")
    for i in range(2):
        x = np.tanh(x @ layers[f"Dense_{i}"]["kernel"] + layers[f"Dense_{i}"]["bias"])
        x = normalize(x, f"BatchRenorm_{i}")
    return (x @ params["head"]["kernel"] + params["head"]["bias"])[:, 0], means


@pytest.mark.parametrize("name", some_quick(["sac", "td3"], "sac"))
def test_joint_pass_has_statistics_of_both(name):
    """CrossQ: values of (s, a) and of (s', a') are of one pass, and running statistics move by both."""
    more = {"ent_coef": 1e-6, "learn_ent_coef": False} if name == "sac" else {"target_noise": 0.0}
    algo, state, batch = setting(name, fakes.BOX, NORMED, target_networks=False, **more)
    assert jax.tree.leaves(state.target_params) == []
    state = jax.tree.map_with_path(lambda p, x: jnp.zeros_like(x) if "steps" in str(p[-1]) else x, state)
    if name == "sac":  # its samples have a deviation of exp(-20)
        head = state.params["actor"]["policy_head"]
        quiet = {"kernel": head["kernel"].at[:, 3:].set(0.0), "bias": head["bias"].at[3:].set(-20.0)}
        state.params["actor"] = {**state.params["actor"], "policy_head": quiet}
    after, aux = jax.jit(algo.update)(state, batch, KEY)
    act = jax.jit(lambda state, obs: algo.act(algo.actor(state), obs, (), KEY, False).action)
    action = act(state, batch.next_obs)
    x = np.concatenate([np.concatenate(pair, -1) for pair in ((batch.obs, batch.action), (batch.next_obs, action))])
    weight = np.asarray(batch.weight)
    passes = [normalized_forward(one(state.params["critic"], i), x, np.tile(weight > 0, 2)) for i in range(2)]
    now, ahead = np.stack([q for q, _ in passes])[:, :N], np.stack([q for q, _ in passes])[:, N:]
    target = np.asarray(batch.reward) + np.asarray(batch.discount) * ahead.min(0)
    np.testing.assert_allclose(aux.metrics["value/q"], (weight * now.mean(0)).mean(), rtol=1e-3)
    np.testing.assert_allclose(aux.metrics["value/target"], (weight * target).mean(), rtol=1e-3)
    for i, (_, means) in enumerate(passes):
        for name, mean in means.items():
            old, new = (one(s.params["critic"], i)["layers"][name]["running_mean"] for s in (state, after))
            np.testing.assert_allclose(new - old, 0.01 * (mean - old), rtol=1e-3, atol=1e-5, err_msg=name)
    assert after.target_params == ()


# ---------------------------------------------------------------- resets


@pytest.mark.parametrize(("name", "what"), some_quick([("sac", "all"), ("sac", "critics"), ("td3", "critics")],
                                                      ("sac", "critics")))  # fmt: skip
def test_resets_give_initial_weights_every_n_updates(name, what):
    algo, state, batch = setting(name, fakes.BOX, resets=Resets(every=3, what=what))
    plain, update = fakes.make(name, fakes.spec(fakes.BOX), fakes.NETWORK, gamma=0.9), jax.jit(algo.update)
    at = lambda updates: state.replace(updates=jnp.uint32(updates))
    fakes.assert_same(update(at(3), batch, KEY)[0], jax.jit(plain.update)(at(3), batch, KEY)[0])
    after, other = (update(at(5), batch, key)[0] for key in (KEY, jax.random.key(5)))
    is_new = lambda state, part, layers: not np.any(state.params[part][layers]["Dense_0"]["bias"])
    assert is_new(after, "critic", "layers") and not is_new(state, "critic", "layers")
    assert is_new(after, "actor", "policy_torso") == (what == "all")
    fakes.assert_same(after.params["critic"], after.target_params["critic"])
    moments = jax.tree.leaves(after.opt_state["critic"])
    assert all(not np.any(x) for x in moments)
    assert np.any(jax.tree.leaves(after.opt_state["actor"])[1]) == (what == "critics")
    assert after.updates == 6 and fakes.differ(after.params["critic"], other.params["critic"])
