"""Targets, losses and one update of DQN with any of its options, spelled out slowly, row after row."""

import dataclasses
import functools
import math

import fakes
import jax
import jax.numpy as jnp
import numpy as np

from jrl import networks
from jrl.types import Discrete

A = 3  # actions
change = dataclasses.replace


def size_of(cfg):
    return {"expected": 1, "c51": cfg.num_atoms, "qr": cfg.num_quantiles}[cfg.head]


@functools.partial(jax.jit, static_argnums=(0, 1))
def outputs_of(cfg, network, params, obs):
    """[N, A, K] without noise."""
    size, env_spec = size_of(cfg), fakes.spec(Discrete(A))
    heads = {"value": size, "advantage": A * size} if cfg.dueling else {"q": A * size}
    net = networks.build(env_spec, change(network, shared=True), {k: networks.Head(n) for k, n in heads.items()})
    out = net.apply(params, obs)
    if not cfg.dueling:
        return out[0].reshape(-1, A, size)
    value, advantage = out[0][:, None], out[1].reshape(-1, A, size)
    return value + advantage - advantage.mean(1, keepdims=True)


def mean_of(cfg, outputs):
    """Expected returns [..., A] in numpy, float64."""
    outputs = np.asarray(outputs, np.float64)
    if cfg.head != "c51":
        return outputs.mean(-1)
    probs = np.exp(outputs - outputs.max(-1, keepdims=True))
    return (probs / probs.sum(-1, keepdims=True)) @ np.linspace(cfg.v_min, cfg.v_max, cfg.num_atoms)


def project(cfg, probs, atoms):
    width = (cfg.v_max - cfg.v_min) / (cfg.num_atoms - 1)
    out = np.zeros(cfg.num_atoms)
    for p, z in zip(probs, atoms):
        position = (min(max(z, cfg.v_min), cfg.v_max) - cfg.v_min) / width
        for i in range(cfg.num_atoms):
            out[i] += p * max(0.0, 1 - abs(position - i))
    return out


def reference_targets(cfg, network, state, batch):
    """[N, K], one row after the other."""
    of = lambda params, obs: outputs_of(cfg, network, params, obs)
    after = np.asarray(of(state.target_params, batch.next_obs), np.float64)
    q_after = mean_of(cfg, after)
    q_online = mean_of(cfg, of(state.params, batch.next_obs))
    q_now = mean_of(cfg, of(state.target_params, batch.obs))
    tau, targets = cfg.munchausen_temperature, []
    log_pi = lambda q: q / tau - (math.log(sum(math.exp((x - max(q)) / tau) for x in q)) + max(q) / tau)
    support = np.linspace(cfg.v_min, cfg.v_max, cfg.num_atoms)
    for n in range(len(q_after)):
        reward, discount = float(batch.reward[n]), float(batch.discount[n])
        policy, shift = np.zeros(A), np.zeros(A)
        if cfg.munchausen:
            now = tau * log_pi(q_now[n])[int(batch.action[n])]
            reward += cfg.munchausen_alpha * min(max(now, cfg.munchausen_clip), 0.0)
            policy, shift = np.exp(log_pi(q_after[n])), -tau * log_pi(q_after[n])
        else:
            policy[(q_online if cfg.double else q_after)[n].argmax()] = 1.0
        if cfg.head == "c51":
            probs, atoms = [], []
            for a in range(A):
                p = np.exp(after[n, a] - after[n, a].max())
                probs += list(policy[a] * p / p.sum())
                atoms += list(reward + discount * (support + shift[a]))
            targets.append(project(cfg, probs, atoms))
        else:
            targets.append(reward + discount * (policy[:, None] * (after[n] + shift[:, None])).sum(0))
    return np.asarray(targets)


def row_loss(cfg, outputs, target):
    """Of one row, outputs and target [K]."""
    if cfg.head == "c51":
        log_probs = outputs - jax.scipy.special.logsumexp(outputs)
        return jnp.sum(jax.scipy.special.xlogy(target, target)) - jnp.sum(target * log_probs)
    huber = lambda u: jnp.where(jnp.abs(u) <= 1, 0.5 * u**2, jnp.abs(u) - 0.5)
    if cfg.head == "qr":
        total = 0.0
        for i in range(cfg.num_quantiles):
            u = target - outputs[i]
            total += jnp.mean(jnp.abs((i + 0.5) / cfg.num_quantiles - (u < 0)) * huber(u))
        return total
    return huber(target[0] - outputs[0]) if cfg.loss == "huber" else 0.5 * (target[0] - outputs[0]) ** 2


def gap_of(cfg, outputs, action, weight):
    """CQL's mean log sum exp Q minus Q of the action taken, of the outputs' mean values."""
    q = outputs.mean(-1)
    if cfg.head == "c51":
        q = jax.nn.softmax(outputs) @ jnp.linspace(cfg.v_min, cfg.v_max, cfg.num_atoms)
    gaps = [jnp.log(sum(jnp.exp(row[a]) for a in range(A))) - row[b] for row, b in zip(q, action, strict=True)]
    return sum(w * gap for w, gap in zip(weight, gaps, strict=True) if w) / len(weight)


def reference_step(cfg, network, state, batch):
    """(gradient, metrics, |TD error| or loss of each row): void rows are absent."""
    target = reference_targets(cfg, network, state, batch)
    weight, action = np.asarray(batch.weight), np.asarray(batch.action)
    counts = np.flatnonzero(weight)

    def loss(params):
        outputs = outputs_of(cfg, network, params, batch.obs)
        taken = outputs[counts, action[counts]]
        rows = jax.vmap(functools.partial(row_loss, cfg))(taken, jnp.float32(target[counts]))
        value = jnp.sum(weight[counts] * rows) / len(weight)
        gap = gap_of(cfg, outputs, action, weight) if cfg.conservative else 0.0
        return value + cfg.cql_weight * gap, (value, rows, gap)

    (_, (value, rows, gap)), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(state.params)
    q = mean_of(cfg, outputs_of(cfg, network, state.params, batch.obs))[np.arange(len(action)), action]
    target_q = target @ np.linspace(cfg.v_min, cfg.v_max, cfg.num_atoms) if cfg.head == "c51" else target.mean(-1)
    metrics = {"loss/value": value, "value/q": (weight * q).mean(), "value/target": (weight * target_q).mean()}
    if cfg.conservative:
        metrics["value/gap"] = gap
    priority = np.zeros(len(weight))
    priority[counts] = rows if cfg.head == "c51" else np.abs(target_q - q)[counts]
    return gradient, metrics, priority


def first_adam_step(cfg, params, gradient):
    """Adam's first step has the size lr, but for eps."""
    step = lambda p, g: np.asarray(p) - cfg.lr * np.asarray(g) / (np.abs(g) + cfg.adam_eps)
    return jax.tree.map(step, params, gradient)
