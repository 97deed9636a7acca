"""One update of PPO that spells everything out, in float64 where it can: for test_ppo."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jrl import distributions
from jrl.algos import actor_critic
from jrl.ops import minibatch
from jrl.types import Discrete

T, B = 8, 8


def reference_gae(cfg, reward, terminated, done, value):
    """Backwards, one environment after the other."""
    advantage = np.zeros(reward.shape)
    for b in range(reward.shape[1]):
        after = 0.0
        for t in reversed(range(reward.shape[0])):
            bootstrap = 0.0 if terminated[t, b] else value[t + 1, b]
            error = reward[t, b] + cfg.gamma * bootstrap - value[t, b]
            after = error + (0.0 if done[t, b] else cfg.gamma * cfg.gae_lambda * after)
            advantage[t, b] = after
    return advantage


def reference_update(cfg, env_spec, network, state, rollout, key):
    """(params, kl_coef, metrics, gradient steps taken) of one update, for the options that the tests use."""
    net, rollout = actor_critic.make(env_spec, network), jax.device_get(rollout)
    value = jax.jit(net.value)(state.params, np.concatenate([rollout.obs, rollout.last_obs[None]]))
    value = np.asarray(value, np.float64)
    mask, terminated, truncated = (np.asarray(x) for x in (rollout.mask, rollout.terminated, rollout.truncated))
    advantage = reference_gae(cfg, np.asarray(rollout.reward, np.float64), terminated, terminated | truncated, value)
    target = advantage + value[:-1]
    if cfg.normalize_advantage:
        advantage = (advantage - advantage[mask].mean()) / (advantage[mask].std() + 1e-8)
    flat = lambda x: np.asarray(x).reshape(T * B, *np.shape(x)[2:])
    rows = {
        "obs": flat(rollout.obs),
        "action": flat(rollout.action),
        "old_log_prob": flat(rollout.extras["log_prob"]),
        "advantage": flat(np.float32(advantage)),
        "target": flat(np.float32(target)),
        "old_value": flat(np.float32(value[:-1])),
        "mask": flat(mask),
    }

    @jax.jit
    def before(params):
        dist, _ = net.apply(params, rollout.obs)
        old = distributions.batched(dist)
        parts = vars(old) if isinstance(env_spec.action, Discrete) else (old.mean, old.log_std)
        return dist.log_prob(rollout.action), parts

    log_prob, old_dist = jax.tree.map(flat, before(state.params))
    rows["kl_log_prob"] = log_prob  # KL is measured from the policy before the update
    if cfg.kl_coef is not None:
        rows["old_dist"] = old_dist
    size = T * B // cfg.num_minibatches
    fraction = mask.mean()

    def log_prob_entropy_kl(params, rows):
        dist, value = net.apply(params, rows["obs"])
        if isinstance(env_spec.action, Discrete):
            log_p = dist.logits - jnp.log(jnp.sum(jnp.exp(dist.logits), -1, keepdims=True))
            log_prob = log_p[jnp.arange(size), rows["action"]]
            entropy, kl = -jnp.sum(jnp.exp(log_p) * log_p, -1), None
            if "old_dist" in rows:
                old = rows["old_dist"]["logits"]
                old = old - jnp.log(jnp.sum(jnp.exp(old), -1, keepdims=True))
                kl = jnp.sum(jnp.exp(old) * (old - log_p), -1)
            return log_prob, entropy, kl, value
        mean, std = dist.mean, jnp.exp(jnp.broadcast_to(dist.log_std, dist.mean.shape))
        density = -0.5 * ((rows["action"] - mean) / std) ** 2 - jnp.log(std) - 0.5 * np.log(2 * np.pi)
        entropy, kl = jnp.sum(0.5 * np.log(2 * np.pi * np.e) + jnp.log(std), -1), None
        if "old_dist" in rows:
            old_mean, old_std = rows["old_dist"][0], jnp.exp(jnp.broadcast_to(rows["old_dist"][1], mean.shape))
            kl = jnp.sum(jnp.log(std / old_std) + (old_std**2 + (old_mean - mean) ** 2) / (2 * std**2) - 0.5, -1)
        return jnp.sum(density, -1), entropy, kl, value

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def gradient(params, rows, kl_coef):
        log_prob, entropy, kl, value = log_prob_entropy_kl(params, rows)
        ratio = jnp.exp(log_prob - rows["old_log_prob"])
        reference = rows["old_log_prob" if cfg.target_kl is None else "kl_log_prob"]
        clipped = jnp.clip(ratio, 1 - cfg.clip_eps, 1 + cfg.clip_eps)
        policy = -jnp.minimum(ratio * rows["advantage"], clipped * rows["advantage"])
        value_loss = 0.5 * (value - rows["target"]) ** 2
        if cfg.value_clip_eps is not None:
            near = rows["old_value"] + jnp.clip(value - rows["old_value"], -cfg.value_clip_eps, cfg.value_clip_eps)
            value_loss = jnp.maximum(value_loss, 0.5 * (near - rows["target"]) ** 2)
        # masked rows are absent; the others weigh the same in every minibatch
        mean = lambda x: jnp.sum(jnp.where(rows["mask"], x, 0.0)) / (size * fraction)
        metrics = {
            "loss/policy": mean(policy),
            "loss/value": mean(value_loss),
            "policy/entropy": mean(entropy),
            "policy/approx_kl": mean(jnp.exp(log_prob - reference) - 1 - (log_prob - reference)),
            "policy/clip_fraction": mean((ratio < 1 - cfg.clip_eps) | (ratio > 1 + cfg.clip_eps)),
        }
        total = metrics["loss/policy"] + cfg.vf_coef * metrics["loss/value"] - cfg.ent_coef * metrics["policy/entropy"]
        if kl is not None:
            metrics["policy/kl"] = mean(kl)
            total = total + kl_coef * metrics["policy/kl"]
        return total, metrics

    params, treedef = jax.tree.flatten(state.params)
    params = [np.asarray(x, np.float64) for x in params]
    first, second = ([np.zeros_like(x) for x in params] for _ in range(2))
    steps, stopped, seen = 0, False, []
    for epoch_key in jax.random.split(key, cfg.num_epochs):
        seen.append([])
        for index in np.asarray(minibatch.shuffle(epoch_key, T, B, cfg.num_minibatches)):
            batch = jax.tree.map(lambda x, index=index: x[index], rows)
            if cfg.normalize_advantage == "minibatch":
                own = batch["advantage"][batch["mask"]]
                batch["advantage"] = (batch["advantage"] - own.mean()) / (own.std() + 1e-8)
            tree = jax.tree.unflatten(treedef, [jnp.float32(x) for x in params])
            grads, metrics = gradient(tree, batch, float(state.own["kl_coef"]))
            seen[-1].append({k: float(v) for k, v in metrics.items()})
            stopped = stopped or (cfg.target_kl is not None and seen[-1][-1]["policy/approx_kl"] > cfg.target_kl)
            if stopped:
                continue
            grads = [np.asarray(g, np.float64) for g in jax.tree.leaves(grads)]
            norm = np.sqrt(sum((g**2).sum() for g in grads))
            if cfg.max_grad_norm is not None and norm > cfg.max_grad_norm:
                grads = [g * cfg.max_grad_norm / norm for g in grads]
            steps += 1
            first = [0.9 * m + 0.1 * g for m, g in zip(first, grads)]
            second = [0.999 * v + 0.001 * g**2 for v, g in zip(second, grads)]
            params = [
                x - cfg.lr * (m / (1 - 0.9**steps)) / (np.sqrt(v / (1 - 0.999**steps)) + cfg.adam_eps)
                for x, m, v in zip(params, first, second)
            ]
    average = lambda epochs, name: np.mean([m[name] for epoch in epochs for m in epoch])
    metrics = {k: average(seen[-1:] if "kl" in k or "clip" in k else seen, k) for k in seen[0][0]}
    residual, spread = (target - value[:-1])[mask], target[mask]
    metrics["value/explained_variance"] = 1 - residual.var() / spread.var()
    metrics["value/target"] = spread.mean()
    return jax.tree.unflatten(treedef, params), metrics, steps
