"""One update of SAC, spelled out slowly."""

import functools
import math

import jax
import jax.numpy as jnp

from jrl.algos import critics
from jrl.ops import random
from jrl.types import Discrete


def forward(params, x):
    """One network of two tanh layers, from a tree of its own (no axis of critics)."""
    layers = params.get("layers") or params.get("value_torso") or params["policy_torso"]
    head = params.get("head") or params.get("value_head") or params["policy_head"]
    for name in ("Dense_0", "Dense_1"):
        x = jnp.tanh(x @ layers[name]["kernel"] + layers[name]["bias"][None])
    return x @ head["kernel"] + head["bias"][None]


def one(params, i):
    return jax.tree.map(lambda x: x[i], params)


def samples(cfg, policy, actor, batch, key, action):
    """[(actions [N, *], the logarithm of their density [N])]: of the Box, of the policy here, of the policy there."""
    rows, count = len(batch.weight), cfg.cql_actions
    there_key, rest = jax.random.split(key)
    here_key, uniform_key = jax.random.split(rest)
    draw = lambda key: jnp.moveaxis(critics.noise(key, rows, (count, *action.shape), None), 1, 0)
    uniform = random.uniform(uniform_key, (rows, count, *action.shape))
    found = [(2 * uniform[:, k] - 1, jnp.full(rows, math.log(0.5) * len(uniform[0, k]))) for k in range(count)]
    for obs, noise in ((batch.obs, draw(here_key)), (batch.next_obs, draw(there_key))):
        found += [policy(actor, obs, noise[k])[:2] for k in range(count)]
    return found


@functools.partial(jax.jit, static_argnames="action")
def reference(cfg, state, batch, key, action):
    """(params, target_critic, metrics, priority) after one update with Adam's first step."""
    discrete, weight = isinstance(action, Discrete), batch.weight
    rows = len(weight)
    mean = lambda x: jnp.sum(weight * x) / rows
    both = critics.noise(key, rows, (2, *action.shape), None) if not discrete else None
    ent_coef = jnp.exp(state.params["log_ent_coef"]) if cfg.learn_ent_coef else cfg.ent_coef

    def q_of(critic, obs, action):  # [C, N], or [C, N, A]
        x = obs if discrete else jnp.concatenate([obs, action], -1)
        values = jnp.stack([forward(one(critic, i), x) for i in range(cfg.num_critics)])
        return values if discrete else values[..., 0]

    def policy(params, obs, noise):
        """(action, log_prob, probabilities)"""
        out = forward(params, obs)
        if discrete:
            prob = jnp.exp(out) / jnp.exp(out).sum(-1, keepdims=True)
            return None, jnp.log(prob), prob
        mean, std = out[:, :2], jnp.exp(jnp.clip(out[:, 2:], -20, 2))
        before = mean + std * noise
        density = jnp.exp(-0.5 * ((before - mean) / std) ** 2) / (std * math.sqrt(2 * math.pi))
        squashed = jnp.tanh(before)
        return squashed, jnp.log(density / (1 - squashed**2)).sum(-1), None

    def soft(critic, params, obs, noise, over):
        """(E[q], E[log_prob])"""
        chosen, log_prob, prob = policy(params, obs, noise)
        q = over(q_of(critic, obs, chosen), 0)
        return (q, log_prob) if prob is None else ((prob * q).sum(-1), (prob * log_prob).sum(-1))

    noise = (None, None) if discrete else (both[:, 0], both[:, 1])
    q, log_prob = soft(state.target_params["critic"], state.params["actor"], batch.next_obs, noise[0], jnp.min)
    many = [] if discrete or not cfg.conservative else samples(cfg, policy, state.params["actor"], batch, key, action)
    if cfg.cql_max_q_backup:
        valued = [q_of(state.target_params["critic"], batch.next_obs, a).min(0) for a, _ in many[2 * cfg.cql_actions :]]
        best = jnp.argmax(jnp.stack(valued), 0)
        q, log_prob = (
            jnp.stack(x)[best, jnp.arange(rows)] for x in (valued, [p for _, p in many[2 * cfg.cql_actions :]])
        )
    ent_bonus = 0.0 if cfg.deterministic_backup else ent_coef * log_prob
    target = batch.reward + batch.discount * (q - ent_bonus)  # not a function of what is differentiated

    def values(critic):
        if discrete:
            return q_of(critic, batch.obs, None)[:, jnp.arange(rows), batch.action]
        return q_of(critic, batch.obs, batch.action)

    def critic_loss(critic):
        return sum(mean(0.5 * (values(critic)[i] - target) ** 2) for i in range(cfg.num_critics))

    def gap(critic):
        """Of each critic, summed."""
        t = cfg.cql_temperature
        if discrete:
            exps = jnp.exp(q_of(critic, batch.obs, None) / t).sum(-1)
        else:
            exps = sum(jnp.exp(q_of(critic, batch.obs, a) / t - log_density[None]) for a, log_density in many)
        return sum(mean(t * jnp.log(exps)[i] - values(critic)[i]) for i in range(cfg.num_critics))

    cql_weight = cfg.cql_weight if cfg.cql_target_gap is None else jnp.exp(state.params.get("log_cql_weight", 0.0))
    learned_from = lambda critic: critic_loss(critic) + (cql_weight * gap(critic) if cfg.conservative else 0.0)

    def adam(params, gradient, lr):
        return jax.tree.map(lambda p, g: p - lr * g / (jnp.abs(g) + cfg.adam_eps), params, gradient)

    params = dict(state.params)
    params["critic"] = adam(params["critic"], jax.grad(learned_from)(params["critic"]), cfg.lr)
    mean_gap = gap(state.params["critic"]) / cfg.num_critics if cfg.conservative else None
    if cfg.cql_target_gap is not None:  # down the slope of -weight * (gap - target)
        slope = -cql_weight * (mean_gap - cfg.cql_target_gap)
        params["log_cql_weight"] = adam(params["log_cql_weight"], slope, cfg.lr)

    def log_likelihood(actor):
        out = forward(actor, batch.obs)
        if discrete:
            return out[jnp.arange(rows), batch.action] - jnp.log(jnp.exp(out).sum(-1))
        inside = 1.0 - 2.0**-24
        before, log_std = jnp.arctanh(jnp.clip(batch.action, -inside, inside)), jnp.clip(out[:, 2:], -20, 2)
        normal = -0.5 * ((before - out[:, :2]) / jnp.exp(log_std)) ** 2 - log_std - 0.5 * math.log(2 * math.pi)
        return (normal - jnp.log(1 - jnp.tanh(before) ** 2)).sum(-1)

    def actor_loss(actor):
        over = jnp.mean if cfg.actor_q == "mean" else jnp.min
        q, log_prob = soft(params["critic"], actor, batch.obs, noise[1], over)
        if int(cfg.bc_updates) > 0:
            q = log_likelihood(actor)
        return mean(ent_coef * log_prob - q), log_prob

    (loss, log_prob), gradient = jax.value_and_grad(actor_loss, has_aux=True)(params["actor"])
    params["actor"] = adam(params["actor"], gradient, cfg.actor_lr)
    if cfg.learn_ent_coef:
        goal = cfg.target_entropy
        goal = goal if goal is not None else 0.98 * math.log(action.n) if discrete else -2.0
        excess = log_prob + goal
        temperature_loss = lambda log_ent_coef: -mean(jnp.exp(log_ent_coef) * excess)
        gradient = jax.grad(temperature_loss)(params["log_ent_coef"])
        params["log_ent_coef"] = adam(params["log_ent_coef"], gradient, cfg.ent_coef_lr)
    target_critic = jax.tree.map(
        lambda t, p: (1 - cfg.tau) * t + cfg.tau * p, state.target_params["critic"], params["critic"]
    )
    before = values(state.params["critic"])
    metrics = {
        "loss/value": critic_loss(state.params["critic"]) / cfg.num_critics,
        "loss/policy": loss,
        "policy/entropy": -mean(log_prob),
        "value/q": mean(before.mean(0)),
        "value/target": mean(target),
        "policy/ent_coef": jnp.exp(params["log_ent_coef"]) if cfg.learn_ent_coef else cfg.ent_coef,
        "train/lr": cfg.lr,
    }
    if cfg.conservative:
        metrics["value/gap"] = mean_gap
    if cfg.cql_target_gap is not None:
        metrics["train/cql_weight"] = cql_weight
    priority = jnp.where(weight > 0, jnp.abs(before - target[None]).mean(0), 0.0)
    return params, target_critic, metrics, priority
