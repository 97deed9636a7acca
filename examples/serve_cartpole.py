"""A client that plays CartPole for a server that learns from it: python examples/serve_cartpole.py ADDRESS EPISODES

The server, beside it:

    python -m jrl.serve ppo --set "external.observation={box: [4]}" --set "external.action={discrete: 2}" \
        --set env.num_envs=2 --stop env_steps=100000
"""

import sys

import gymnasium

from jrl.serve.client import EpisodeLost, PolicyClient


def main(address: str = "http://127.0.0.1:9900", episodes: int = 500) -> list[float]:
    """Plays so many episodes; their returns."""
    client, env, returns = PolicyClient(address), gymnasium.make("CartPole-v1"), []
    while len(returns) < episodes:
        try:
            episode, (obs, _), over = client.start_episode(), env.reset(), False
            while not over:
                obs, reward, terminated, truncated, _ = env.step(int(client.get_action(episode, obs)))
                client.log_returns(episode, float(reward))
                over = terminated or truncated
            returns.append(client.end_episode(episode, obs, truncated=truncated)["return"])
        except EpisodeLost:  # the server was away: another one
            continue
        if len(returns) % 50 == 0:
            print(f"{len(returns)} episodes, mean return of the last 50: {sum(returns[-50:]) / 50:.1f}")
    client.close()
    return returns


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
