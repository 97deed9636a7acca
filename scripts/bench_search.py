"""How fast is acting of MuZero and AlphaZero beside a search by mctx alone? Same networks, batch and simulations.

    python scripts/bench_search.py

Prints CPU milliseconds per call, medians of 3 alternating rounds, and the ratio mctx / jrl: 1 is as fast.
"""

import functools
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import mctx

from jrl.algos import alphazero, muzero
from jrl.algos.search import Search
from jrl.envs import board_games, multi_agent
from jrl.networks import NetworkConfig
from jrl.types import Array, Box, Discrete, EnvSpec, Key

ROUNDS = 3
KEY = jax.random.key(0)

Act = Callable[[Key], Array]


def searched(root: mctx.RootFnOutput, step: Callable, cfg: Search, key: Key, blocked: Array | None = None) -> Array:
    """Returns the actions that mctx finds with the options of `cfg`."""
    transform = functools.partial(
        mctx.qtransform_completed_by_mix_value, value_scale=cfg.value_scale, rescale_values=cfg.rescale
    )
    considered = min(cfg.max_considered_actions, root.prior_logits.shape[-1])
    return mctx.gumbel_muzero_policy(
        (), key, root, step, cfg.simulations, blocked, qtransform=transform, max_num_considered_actions=considered
    ).action


def of_muzero(num_envs: int, cfg: Search) -> tuple[Act, Act]:
    """Returns acting by jrl and by mctx alone, on the sizes of CartPole."""
    algo = muzero.make(
        muzero.Config(search=cfg), EnvSpec(Box((4,)), Discrete(2), num_envs), NetworkConfig(hidden=(64,))
    )
    actor, net = algo.actor(algo.init(KEY)), algo.update.args[1].net
    obs = jax.random.normal(KEY, (num_envs, 4))

    @jax.jit
    def alone(actor, obs, key):
        def step(_, key, action, latent):
            latent, reward = net.step(actor.params, latent, action)
            logits, value = net.predict(actor.params, latent)
            reward, value = muzero.to_scalar(reward), muzero.to_scalar(value)
            discount = jnp.full_like(value, 0.997)
            out = mctx.RecurrentFnOutput(reward=reward, discount=discount, prior_logits=logits, value=value)
            return out, latent

        latent = net.begin(actor.params, obs)
        logits, value = net.predict(actor.params, latent)
        root = mctx.RootFnOutput(prior_logits=logits, value=muzero.to_scalar(value), embedding=latent)
        return searched(root, step, cfg, key)

    own = jax.jit(lambda actor, obs, key: algo.act(actor, obs, (), key, True).action)
    return lambda key: own(actor, obs, key), lambda key: alone(actor, obs, key)


def of_alphazero(games: int, cfg: Search) -> tuple[Act, Act]:
    """Returns acting by jrl and by mctx alone in the first position of TicTacToe, whose step mctx calls itself."""
    game = board_games.tic_tac_toe()
    env = multi_agent.build(game, games)
    algo = alphazero.make(alphazero.Config(search=cfg), env.spec, NetworkConfig(hidden=(128, 128)))
    actor, net = algo.actor(algo.init(KEY)), algo.update.args[1].net
    state, obs = env.reset(KEY)

    @jax.jit
    def alone(actor, board, key):
        def look(board):
            seen = jax.tree.map(lambda x: x[jnp.arange(games), board.turn], game.observe(board))
            dist, value = net.apply(actor.params, seen)
            return dist.logits, value, seen["action_mask"] == 0

        def step(_, key, action, node):
            board, ended = node
            after, reward, over = game.step(board, jnp.stack([action, action], 1), jnp.zeros((1, games)))
            logits, value, _ = look(after)
            reward = jnp.where(ended, 0.0, reward[jnp.arange(games), board.turn])
            ended = ended | over[:, 0]
            discount, value = jnp.where(ended, 0.0, -0.99), jnp.where(ended, 0.0, value)
            out = mctx.RecurrentFnOutput(reward=reward, discount=discount, prior_logits=logits, value=value)
            return out, (after, ended)

        logits, value, blocked = look(board)
        root = mctx.RootFnOutput(prior_logits=logits, value=value, embedding=(board, jnp.zeros(games, bool)))
        return searched(root, step, cfg, key, blocked)

    act = algo.act_in(env)
    own = jax.jit(lambda actor, obs, key, state: act(actor, obs, (), key, True, state).action)
    return lambda key: own(actor, obs, key, state), lambda key: alone(actor, state.inner, key)


def main() -> None:
    works = [
        ("MuZero, 16 environments, 16 simulations", of_muzero(16, Search(simulations=16)), 60),
        ("AlphaZero, 128 games, 32 simulations", of_alphazero(128, Search(simulations=32, rescale=False)), 15),
    ]
    for name, both, calls in works:
        seconds: tuple[list[float], list[float]] = ([], [])
        for act in both:
            jax.block_until_ready(act(KEY))  # compiles
        for _ in range(ROUNDS):
            for act, found in zip(both, seconds, strict=True):
                start = time.process_time()
                for i in range(calls):
                    jax.block_until_ready(act(jax.random.key(i)))
                found.append((time.process_time() - start) / calls)
        own, alone = map(statistics.median, seconds)
        print(f"{name}: jrl {1e3 * own:.2f} ms, mctx {1e3 * alone:.2f} ms, ratio {alone / own:.2f}")


if __name__ == "__main__":
    main()
