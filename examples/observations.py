"""What becomes of an observation before a network sees it.

    python examples/observations.py

There is no preprocessor to call: environments give the shapes that policies take, and what is left (bytes to floats,
one-hot) is part of the network. Prints the observation of Pong and of FrozenLake, and the first layer behind each.
"""

from jrl.api import PPOConfig


def main() -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    found = {}
    for env in ("Pong-v5", "FrozenLake-v1"):
        config = PPOConfig().environment(env, backend="envpool").env_runners(num_envs=4, rollout_fragment_length=8)
        with config.build() as algo:
            policy = algo.get_policy()
            kernels = [(name, shape) for name, shape, _ in policy.parameters() if "torso" in name and "kernel" in name]
            found[env] = (policy.observation_space.shape, kernels[0][1])
            print(env)
            print("  observation:", policy.observation_space)  # Pong: 4 frames, grey, 84 x 84, the newest last
            print("  actions:", policy.action_space)
            print("  first layer:", *kernels[0])
    return found


if __name__ == "__main__":
    main()
