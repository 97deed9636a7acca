"""DQN as functions: environments, replay and gradient steps in one compiled program.

    python examples/replay.py [PARTS]

Prints the return after each part of training, and shows that the replay was never copied.
"""

import sys

import jax

from jrl.algos import dqn
from jrl.algos.exploration import EpsilonGreedy
from jrl.envs import make
from jrl.learn.learner import off_policy
from jrl.metrics import episodes
from jrl.networks import NetworkConfig
from jrl.replay import ring
from jrl.rollout import unroll
from jrl.types import element


def main(parts: int = 8) -> tuple[list[float], bool]:
    env = make("CartPole-v1", backend="jax", num_envs=10)
    cfg = dqn.Config(lr=1e-3, double=True, exploration=EpsilonGreedy(epsilon=((0, 1.0), (20_000, 0.02))))
    algo = dqn.make(cfg, env.spec, NetworkConfig(hidden=(64, 64), activation="relu"))
    buffer = ring.make(
        element(env.spec.observation),
        element(env.spec.action),
        capacity=50_000,
        num_envs=10,
        batch_size=128,
        gamma=cfg.gamma,
    )
    learn = off_policy(algo, buffer, updates=1, learning_starts=1000)  # one gradient step per 10 environment steps
    collect = unroll.make(env, algo.act, length=1, carry=algo.carry)

    def iteration(carry, key):
        state, replay, envs = carry
        collect_key, learn_key = jax.random.split(key)
        envs, rollout, report = collect.step(envs, algo.actor(state), collect_key)
        state, replay, _ = learn.step(state, replay, rollout, learn_key)
        return (state, replay, envs), report

    many = lambda carry, key: jax.lax.scan(iteration, carry, jax.random.split(key, 2000))
    train = jax.jit(many, donate_argnums=0)

    key = jax.random.key(0)
    carry = jax.jit(lambda key: (learn.init(key), learn.init_replay(), collect.init(key)))(key)
    where = carry[1].obs.unsafe_buffer_pointer()
    returns = []
    for part in range(parts):
        carry, reports = train(carry, jax.random.fold_in(key, part))
        last = episodes.summarize([jax.tree.map(lambda x: x[-1][None], reports)])
        returns.append(last["episode/return"])
        print(f"{20_000 * (part + 1):>7,} steps: return {returns[-1]:.0f}, {carry[0].updates:,} updates")
    stayed = carry[1].obs.unsafe_buffer_pointer() == where
    print("replay is where it was:", stayed)
    return returns, stayed


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
