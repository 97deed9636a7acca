"""Videos of several agents: whole games, by whoever acts in them, and who draws."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from late_arrivals import late_arrivals
from PIL import Image
from saved import save_games

from jrl import evaluate, record, train
from jrl.envs import multi_toys
from jrl.envs.multi_agent import MultiDefinition


def square(red, shade=0):
    return np.full((8, 12, 3), (red, shade, 0), np.uint8)


def painted() -> MultiDefinition:
    """late_arrivals, whose red is the number of its steps that are over."""
    return late_arrivals()._replace(draw=lambda t: square(30 * int(t)), fps=5.0)


def rigged() -> MultiDefinition:
    """Two moves that pay 1 to player_0 and cost player_1 as much, whatever they are."""
    game = multi_toys.rock_paper_scissors(2)

    def step(state, actions, draws):
        state, reward, over = game.step(state, actions, draws)
        return state, jnp.broadcast_to(jnp.array([1.0, -1.0]), reward.shape), over

    return game._replace(step=step, draw=lambda state: square(30 * int(state.count)))


class Countdown:
    """Agents a and b, of whom a leaves after two steps and b after `length`; RLlib's interface. Its red is the step."""

    def __init__(self, config=None):
        self.possible_agents = ["a", "b"]
        self.observation_space, self.action_space = spaces.Box(0.0, 9.0, (1,), np.float32), spaces.Discrete(2)
        self.length, self.draws = config.get("length", 4), config.get("draws", True)
        self.shade = 70 if config.get("render_mode") == "rgb_array" else 0

    def _see(self):
        return {agent: np.array([self.t], np.float32) for agent in ("a", "b")[self.t >= 2 :]}

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self._see(), {}

    def step(self, actions):
        self.t += 1
        over = {"a": True} if self.t == 2 else {}
        seen = self._see() | {agent: np.array([self.t], np.float32) for agent in over}
        flags = {**over, "__all__": self.t >= self.length}
        return seen, dict.fromkeys(actions, 1.0), flags, {"__all__": False}, {}

    def render(self):
        return square(30 * self.t, self.shade) if self.draws else None

    def close(self):
        pass


class Strict(Countdown):
    """One that does not know of `render_mode`."""

    def __init__(self, config=None):
        if set(config) - {"length"}:
            raise ValueError(f"unknown {set(config) - {'length'}}")
        super().__init__(config)


class Screens:
    """PettingZoo's parallel interface: each agent sees an image of its own, and nothing draws the whole."""

    possible_agents = ("left", "right")
    metadata = None

    def observation_space(self, agent):
        return spaces.Box(0, 255, (64, 32, 3), np.uint8)

    def action_space(self, agent):
        return spaces.Discrete(2)

    def _see(self):
        return {a: np.full((64, 32, 3), 100 * i + self.t, np.uint8) for i, a in enumerate(self.possible_agents)}

    def reset(self, seed=None, options=None):
        self.t, self.agents = 0, list(self.possible_agents)
        return self._see(), {agent: {} for agent in self.agents}

    def step(self, actions):
        self.t += 1
        self.agents = self.agents if self.t < 3 else []
        each = lambda value: dict.fromkeys(self.possible_agents, value)
        return self._see(), each(1.0), each(self.t == 3), each(False), each({})

    def render(self):
        raise NotImplementedError("no pictures here")

    def close(self):
        pass


def saved(directory, id, **sections):
    """A run directory of policies as they were made."""
    made = {"algo": {"name": "ppo"}, **sections}
    save_games(directory / "run", **{**made, "env": {"id": id, "num_envs": 4, **sections.get("env", {})}})
    return directory / "run"


def trained(directory, *args, **sections):
    """The exit status of a short run."""
    data = {
        "algo": {"name": "ppo", "num_epochs": 1, "num_minibatches": 1},
        "network": {"hidden": [8]},
        "rollout": {"length": 8},
        "run": {"compile_cache": False, "log": []},
    }
    (directory / "run.yaml").write_text(json.dumps({**data, **sections}))
    return train.main([str(directory / "run.yaml"), f"--out={directory / 'run'}", *args])


def reds(path):
    """(red of each frame's first pixel, green of the last frame's)."""
    with Image.open(path) as image:
        found = []
        for i in range(image.n_frames):
            image.seek(i)
            pixel = image.convert("RGB").getpixel((1, 1))
            found.append(pixel[0])
        return found, pixel[1]


def recorded(run, out, capsys, *args):
    capsys.readouterr()
    assert record.main([str(run), "--out", str(out), *args]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.slow
def test_a_game_is_seen_from_its_reset_to_the_end_of_the_last_agent(tmp_path, capsys):
    memory = {"core": {"name": "gru", "size": 4}, "use_prev_action": True, "use_prev_reward": True}
    tables = {"mapping": {"guest|waiting": "b", ".*": "a"}, "agent_id": True}
    run = saved(tmp_path, f"{__name__}:painted", network=memory, multi_agent=tables)
    said = recorded(run, tmp_path / "video.gif", capsys, "--episodes=2")
    capsys.readouterr()
    assert evaluate.main([str(run), "--episodes=1", "--envs=1", "--json"]) == 0
    total = json.loads(capsys.readouterr().out)["return"]
    # the environment draws no numbers: what an evaluation plays, memories and all, is what is seen
    assert said[:2] == [f"episode {n}: return {total:g}, 6 steps" for n in (1, 2)]
    assert said[2].endswith("14 frames, 5 per second, drawn by its own picture")
    assert reds(tmp_path / "video.gif")[0] == [0, 30, 60, 90, 120, 150, 180] * 2


@pytest.mark.parametrize(("id", "shade"), [("Countdown", 70), ("Strict", 0)])
def test_the_render_method_of_a_host_environment(tmp_path, capsys, id, shade):
    run = saved(tmp_path, f"{__name__}:{id}", env={"options": {"length": 5}})
    said = recorded(run, tmp_path / "video.gif", capsys)
    assert said[0] == "episode 1: return 7, 5 steps"  # two steps of a, five of b
    assert said[1].endswith("6 frames, 30 per second, drawn by its own render()")
    assert reds(tmp_path / "video.gif") == ([0, 30, 60, 90, 120, 150], shade)


def test_images_that_agents_see_stand_side_by_side(tmp_path, capsys):
    run = saved(tmp_path, f"{__name__}:Screens")
    said = recorded(run, tmp_path / "video.gif", capsys)
    assert said[-1].endswith("4 frames, 10 per second, drawn by its agents' observations")
    with Image.open(tmp_path / "video.gif") as image:
        image.seek(3)
        found = np.asarray(image.convert("RGB"))
    assert found.shape == (256, 2 * 128 + 2, 3)
    assert found[9, 9].tolist() == [3] * 3 and found[9, 200].tolist() == [103] * 3


@pytest.mark.slow
def test_each_episode_of_self_play_shows_the_learner_in_another_game(tmp_path, capsys):
    run = saved(tmp_path, f"{__name__}:rigged", multi_agent={"self_play": {"pool": 2}})
    said = recorded(run, tmp_path / "video.gif", capsys, "--episodes=5")
    # the learner sits in seat 0, 1, 0, 1 of the block's games, and it is its return that is told
    assert said[:5] == [f"episode {n}: return {2 if n % 2 else -2}, 2 steps" for n in range(1, 6)]
    assert reds(tmp_path / "video.gif")[0] == [0, 30, 60] * 5


@pytest.mark.slow
def test_videos_of_a_run_under_way(tmp_path):
    play = {"every": 64, "duration": 2, "record": 1}
    env = {"id": "MultiAgentCartPole-v1", "num_envs": 8, "horizon": 5}
    how = {"env": env, "evaluation": play, "multi_agent": {"mapping": "by_agent"}}
    assert trained(tmp_path, "--stop=env_steps=128", **how) == 0
    videos = sorted((tmp_path / "run" / "videos").iterdir())
    import imageio_ffmpeg

    assert {video.suffix for video in videos} == {".mp4"} and len(videos) > 1
    assert {imageio_ffmpeg.count_frames_and_secs(str(video))[0] for video in videos} == {6}


@pytest.mark.parametrize(
    ("id", "options", "said"),
    [
        (
            "late_arrivals:late_arrivals",
            {},
            "it has no picture of its own (a MultiDefinition's draw); its agents do not observe",
        ),
        (f"{__name__}:Countdown", {"draws": False}, "its own render(): render(): frame 1 is None: return a picture"),
    ],
)
def test_what_cannot_be_drawn_is_one_error(tmp_path, capsys, id, options, said):
    run = saved(tmp_path, id, env={"options": options})
    capsys.readouterr()
    assert record.main([str(run), "--out", str(tmp_path / "video.gif")]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: env {id} cannot be drawn: ") and said in told and told.count("\n") == 1
    assert not (tmp_path / "video.gif").exists()
    how = {"env": {"id": id, "num_envs": 4, "options": options}, "evaluation": {"every": 64, "record": 1}}
    assert trained(tmp_path, "--stop=env_steps=64", **how) == 2
    assert f"error: evaluation.record: env {id} cannot be drawn" in capsys.readouterr().err
