"""Self-play in TicTacToe: one policy against frozen copies of itself, and another copy whenever it wins often enough.

RLlib's example does it with a callback that adds policies and changes the mapping; here it is a section of the config,
and the copies lie in a pool of a fixed size, so that nothing is compiled again and memory stays as it is.
"""

import numpy as np

from jrl.api import PPOConfig

CENTRE = 4


def main(steps: int = 40_000) -> tuple[list[dict[str, float]], int]:
    """Trains for so many environment steps; how the league stood at each result, and the first move of the policy."""
    config = (
        PPOConfig()
        .environment("TicTacToe-v0")
        .env_runners(num_envs=32, rollout_fragment_length=32)
        .training(lr=1e-3, model={"hidden": [64]})
        .multi_agent(self_play={"policy": "main", "pool": 4, "snapshot_win_rate": 0.55, "window": 200})
        .reporting(min_sample_timesteps_per_iteration=4_000)
    )
    rows: list[dict[str, float]] = []
    with config.build() as algo:
        while not rows or rows[-1]["steps"] < steps:
            result = algo.train()
            league = result["league"]
            rows.append({"steps": result["num_env_steps_sampled_lifetime"], **league})
            print(
                f"{rows[-1]['steps']:,} steps: wins {league['win_rate']:.0%} against {league['size'] - 1} copies, "
                f"Elo {league['elo']:.0f} ± {league['elo_se']:.0f}"
            )
        # an empty board, and it is one's turn
        board = {"obs": np.eye(19, dtype=np.float32)[18], "action_mask": np.array([1] * 9 + [0], np.int8)}
        return rows, int(algo.compute_single_action(board, policy_id="main", explore=False))


if __name__ == "__main__":
    print("first move:", "the centre" if main()[1] == CENTRE else "another")
