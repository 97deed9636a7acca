"""A league of three roles in TicTacToe: main, its exploiter and the league's exploiter, and frozen copies of them.

As in RLlib's example, and after AlphaStar (Vinyals et al. 2019, section Multi-agent learning): `main` plays against
copies of everybody, `main_exploiter` against main, `league_exploiter` against the copies. Who earns enough gives the
league another copy, with `add_policy`, for which the run is made anew.
"""

import functools
import random
from collections.abc import Sequence
from typing import Any

from jrl.api import PPOConfig
from jrl.callbacks import Callbacks

ROLES = ("main", "main_exploiter", "league_exploiter")
MOST = 9  # policies


def opponents(agent: str, episode: Any, *, copies: Sequence[str]) -> str:
    """Who sits where in a game: drawn by the game's number, so that a run repeats itself."""
    draw = random.Random(episode.id_)
    role, copy = draw.choice(ROLES), draw.choice(copies)
    players = [role, "main" if role == "main_exploiter" else copy]
    draw.shuffle(players)
    return players[int(agent.endswith("1"))]


class League(Callbacks):
    """Adds a copy of whoever earns enough against the others, and takes the oldest away where there are enough."""

    def __init__(self, enough: float = 0.3, wait: int = 3):
        self._enough, self._wait = enough, wait
        self.copies = ["first"]
        self._taken, self._since = 0, 0

    def on_train_result(self, *, algorithm, result, **kwargs) -> None:
        self._since += 1
        earned = {role: result["policy_reward_mean"][role] for role in ROLES}
        best = max(earned, key=lambda role: earned[role])
        if self._since < self._wait or not earned[best] >= self._enough:
            return
        self._since, self._taken = 0, self._taken + 1
        if len(self.copies) == MOST - len(ROLES):
            kept = self.copies[1:]
            algorithm.remove_policy(self.copies[0], policy_mapping_fn=functools.partial(opponents, copies=kept))
            self.copies = kept
        name = f"{best}_v{self._taken}"
        self.copies = [*self.copies, name]
        print(f"{best} earns {earned[best]:.2f}: {name} joins the league of {len(ROLES) + len(self.copies)}")
        algorithm.add_policy(
            name,
            policy_state=algorithm.get_policy(best).get_state(),
            policy_mapping_fn=functools.partial(opponents, copies=self.copies),
            policies_to_train=ROLES,
        )


def main(iterations: int = 40) -> list[str]:
    """Trains for so many results; the policies of the league."""
    config = (
        PPOConfig()
        .environment("TicTacToe-v0")
        .env_runners(num_envs=32, rollout_fragment_length=32)
        .training(lr=1e-3, model={"hidden": [64]})
        .multi_agent(
            policies=[*ROLES, "first"],  # a policy that never learned is there to begin with
            policy_mapping_fn=functools.partial(opponents, copies=["first"]),
            policies_to_train=ROLES,
        )
        .callbacks(League)
        .reporting(min_sample_timesteps_per_iteration=4_000)
    )
    with config.build() as algo:
        for _ in range(iterations):
            algo.train()
        return list(algo.policy_map)


if __name__ == "__main__":
    print("the league:", ", ".join(main()))
