"""Clients that play TicTacToe, a game of turns, for a server that learns both sides.

    python examples/serve_agents.py ADDRESS GAMES

The server, beside it:

    python -m jrl.serve ppo --set "external.agents=[cross, nought]" --set env.num_envs=8 --set algo.gamma=1.0 \
        --set "external.observation={dict: {obs: {box: [18]}, action_mask: {multi_binary: [9]}}}" \
        --set "external.action={discrete: 9}" --set rollout.length=128 --set algo.gae_lambda=0.9 \
        --set algo.normalize_advantage=false --set algo.ent_coef=0.1 --stop env_steps=300000
"""

import random
import sys
import threading

import numpy as np

from jrl.serve.client import EpisodeLost, PolicyClient

LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]
AGENTS = ("cross", "nought")


class TicTacToe:
    """A game with the members of PettingZoo's AEC environments that a loop over turns needs."""

    def __init__(self):
        self.squares = dict.fromkeys(range(9))
        self.rewards = dict.fromkeys(AGENTS, 0.0)
        self.agent, self.over = "cross", False

    def last(self):
        """What the agent whose turn it is sees, what it has earned since its latest move, whether the game is over."""
        mine, free = self.agent, [owner is None for owner in self.squares.values()]
        pieces = [
            owner == who for who in sorted(AGENTS, key=lambda who: who != mine) for owner in self.squares.values()
        ]
        seen = {"obs": np.array(pieces, np.float32), "action_mask": np.array(free, np.int8)}
        return seen, self.rewards.pop(mine), self.over, False, {}

    def agent_iter(self):
        """Whose turn it is; behind the end once each of both."""
        while not self.over:
            yield self.agent
        yield self.agent
        self.agent = AGENTS[self.agent == "cross"]
        yield self.agent

    def step(self, square):
        self.squares[square] = self.agent
        other = AGENTS[self.agent == "cross"]
        won = any(all(self.squares[i] == self.agent for i in line) for line in LINES)
        self.rewards = {self.agent: float(won), other: -float(won)}
        self.over, self.agent = won or None not in self.squares.values(), other


def play(client, opponent=None):
    """Plays a game; each side's return. An `opponent` moves by chance, and nobody learns from the game."""
    game, episode = TicTacToe(), client.start_episode(training_enabled=opponent is None)
    returns = dict.fromkeys(AGENTS, 0.0)
    for agent in game.agent_iter():
        seen, reward, over, _, _ = game.last()
        returns[agent] += reward
        if agent == opponent:
            if not over:
                game.step(random.choice(np.flatnonzero(seen["action_mask"]).tolist()))
            continue
        client.log_returns(episode, reward, agent=agent)
        if over:
            client.end_agent(episode, agent, seen)
        else:
            game.step(int(client.get_action(episode, seen, agent=agent)))
    client.end_episode(episode)
    return returns


def learn(address, games):
    """Plays so many games for the server to learn from."""
    client = PolicyClient(address)
    while games:
        try:
            play(client)
            games -= 1
        except EpisodeLost:  # the server was away: another one
            continue
        except ConnectionError:  # the run has ended
            break
    client.close()


def main(address="http://127.0.0.1:9900", games=20_000, players=8):
    """Shares of games against chance that are won, drawn and lost, before and after learning from so many games."""
    found = []
    for count in (0, games):
        threads = [threading.Thread(target=learn, args=(address, count // players)) for _ in range(players)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        client = PolicyClient(address)
        results = [play(client, AGENTS[i % 2])[AGENTS[1 - i % 2]] for i in range(600)]
        client.close()
        found.append([float(np.mean(np.array(results) == result)) for result in (1, 0, -1)])
        won, drawn, lost = found[-1]
        print(f"after {count} games: won {won:.1%}, drawn {drawn:.1%}, lost {lost:.1%}", flush=True)
    return found


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
