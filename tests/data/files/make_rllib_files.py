"""Makes the files beside it with RLlib itself.

    pip install 'ray[rllib]==2.60.0' lz4 msgpack-numpy
    python make_rllib_files.py  # in this directory

What is in them follows from the number e of an episode and its step t: the observation is [e, t] f32, the reward
10 e + t; the action is t % 2 in JSON, random in Parquet. Episodes 0 and 2 have 3 steps and a true end, episode 1 has 4
and a time limit.
"""

import glob
import os
import shutil

import gymnasium as gym
import numpy as np
import ray
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.offline.json_writer import JsonWriter
from ray.rllib.offline.offline_env_runner import OfflineSingleAgentEnvRunner
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch
from ray.rllib.utils.compression import compression_supported

LENGTHS = (3, 4, 3)


class Counting(gym.Env):
    """Episodes as above."""

    observation_space = gym.spaces.Box(-100, 100, (2,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, config=None):
        self.episode = -1

    def reset(self, *, seed=None, options=None):
        self.episode, self.t = self.episode + 1, 0
        return np.array([self.episode, 0], np.float32), {}

    def step(self, action):
        reward, self.t = 10.0 * self.episode + self.t, self.t + 1
        over = self.t == LENGTHS[self.episode % 3]
        ended = self.episode % 3 != 1
        return np.array([self.episode, self.t], np.float32), reward, over and ended, over and not ended, {}


def fragment(episode, steps, unroll, agent=0):
    t = np.array(steps)
    over = t == LENGTHS[episode] - 1
    return SampleBatch(
        obs=np.stack([np.full(len(t), episode), t], 1).astype(np.float32),
        new_obs=np.stack([np.full(len(t), episode), t + 1], 1).astype(np.float32),
        actions=t % 2,
        rewards=(10 * episode + t).astype(np.float32),
        terminateds=over & (episode != 1),
        truncateds=over & (episode == 1),
        infos=np.array([{}] * len(t)),
        eps_id=np.full(len(t), 700 + episode),
        unroll_id=np.full(len(t), unroll),
        agent_index=np.full(len(t), agent),
        t=t,
        action_prob=np.full(len(t), 0.5, np.float32),
        action_logp=np.full(len(t), np.log(0.5), np.float32),
        state_in_0=np.zeros((1, 2), np.float32),
        seq_lens=np.array([len(t)]),
    )


def json_files():
    assert compression_supported()
    writer = JsonWriter("json")
    for part in (fragment(0, [0, 1], 0), fragment(1, [0, 1, 2, 3], 1), fragment(0, [2], 2), fragment(2, [0, 1, 2], 3)):
        writer.write(part)
    writer = JsonWriter("json-multi")
    for steps in ([0, 1], [2]):  # two agents of policy "a", one of "b"
        parts = [fragment(0, steps, 0, agent) for agent in (0, 1, 2)]
        a = SampleBatch({k: np.concatenate([parts[0][k], parts[1][k]]) for k in parts[0] if k != "state_in_0"})
        writer.write(MultiAgentBatch({"a": a, "b": parts[2]}, env_steps=len(steps)))
    for name in ("json", "json-multi"):
        shutil.move(glob.glob(f"{name}/*.json")[0], f"rllib-{name}.json")
        shutil.rmtree(name)


def parquet_files():
    ray.init(num_cpus=1, include_dashboard=False)
    for kind, rows in (("tabular", 6), ("packed", 10), ("episodes", 3)):
        config = PPOConfig().environment(Counting).env_runners(num_env_runners=0).offline_data(
            output=kind, output_write_episodes=kind == "episodes",
            output_compress_columns=["obs"] if kind == "packed" else [],
            output_write_method_kwargs={"min_rows_per_file": rows},
        )  # fmt: skip
        runner = OfflineSingleAgentEnvRunner(config=config, worker_index=0)
        runner.sample(num_timesteps=10, random_actions=True)
        shutil.rmtree(f"rllib-{kind}", ignore_errors=True)
        os.mkdir(f"rllib-{kind}")
        for number, path in enumerate(sorted(glob.glob(f"{kind}/*/*/*.parquet"))):
            shutil.move(path, f"rllib-{kind}/{number}.parquet")
        shutil.rmtree(kind)


if __name__ == "__main__":
    json_files()
    parquet_files()
