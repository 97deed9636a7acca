"""Gymnasium environments with many spaces, for worker processes too: a module that imports neither jrl nor jax."""

import gymnasium
import numpy as np

_s = gymnasium.spaces
OBSERVATION = _s.Dict(
    [
        ("camera", _s.Box(0, 255, (4, 4, 1), np.uint8)),
        (
            "pose",
            _s.Tuple(
                [
                    _s.Box(-1, 1, (2,), np.float64),
                    _s.Dict([("gear", _s.Discrete(5, start=-1)), ("switches", _s.MultiBinary((2, 2)))]),
                ]
            ),
        ),
        ("plan", _s.MultiDiscrete([3, 4])),
        ("small", _s.Box(-5, 5, (3,), np.int8)),
        ("large", _s.Box(-9 * 10**18, 9 * 10**18, (1,), np.int64)),
        ("ready", _s.Box(0, 1, (2,), np.bool_)),
    ]
)
ACTION = _s.Dict(
    [
        ("gear", _s.Discrete(3, start=2)),
        ("arm", _s.Tuple([_s.Box(-2, 2, (2,), np.float64), _s.MultiBinary(3)])),
        ("keys", _s.MultiDiscrete([2, 4])),
        ("level", _s.Box(5, 8, (1,), np.int32)),
    ]
)


def observed(count):
    """What Echo shows after `count` steps."""
    return {
        "camera": np.full((4, 4, 1), 50 * count, np.uint8),
        "pose": (
            np.array([count / 10, -1]),
            {"gear": count - 1, "switches": np.array([[1, 0], [count % 2, 1]], np.int8)},
        ),
        "plan": np.array([count % 3, count]),
        "small": np.array([-count, 0, count], np.int8),
        "large": np.array([10**9 + count]),
        "ready": np.array([True, count == 1]),
    }


def expected(counts):
    """The same of a batch, as a policy gets it."""
    rows = [observed(count) for count in counts]
    stack = lambda pick, dtype: np.stack([pick(row) for row in rows]).astype(dtype)
    return {
        "camera": stack(lambda r: r["camera"], np.uint8),
        "pose": (
            stack(lambda r: r["pose"][0], np.float32),
            {
                "gear": stack(lambda r: np.asarray(r["pose"][1]["gear"] + 1), np.int32),
                "switches": stack(lambda r: r["pose"][1]["switches"], np.int8),
            },
        ),
        "plan": stack(lambda r: r["plan"], np.int32),
        "small": stack(lambda r: r["small"], np.int8),
        "large": stack(lambda r: r["large"], np.int32),
        "ready": stack(lambda r: r["ready"], bool),
    }


def own_action(action):
    """What the environment must get for one action of a policy."""
    return {
        "gear": np.int64(action["gear"] + 2),
        "arm": (action["arm"][0].astype(np.float64), action["arm"][1].astype(np.int8)),
        "keys": action["keys"].astype(np.int64),
        "level": (action["level"] + 5).astype(np.int32).reshape(1),
    }


class Echo(gymnasium.Env):
    """Shows how many steps it has made, in every kind of space; keeps its latest action and whether it is one."""

    observation_space, action_space = OBSERVATION, ACTION
    length = 3

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return observed(0), {}

    def step(self, action):
        self.last = (action, self.action_space.contains(action))
        self.count += 1
        return observed(self.count), 1.0, self.count == self.length, False, {}


class Legal(gymnasium.Env):
    """Counts its steps, up to 3, and says in its infos which of three actions are legal."""

    observation_space, action_space = _s.Box(0, 99, (1,)), _s.Discrete(3)

    def __init__(self, name="action_mask", choices=3, raises_at=None, forgets_at=None):
        self.name, self.choices, self.raises_at, self.forgets_at = name, choices, raises_at, forgets_at
        self.start, self.resets, self.made_anew = 0, 0, False

    @staticmethod
    def mask(count):
        return [count != 1, count == 1, True]

    def _now(self):
        if self.count == self.raises_at:
            raise ZeroDivisionError
        info = {self.name: np.array(self.mask(self.count)[: self.choices], np.int8), "count": self.count, "text": "x"}
        if self.count == self.forgets_at:
            info = {"count": self.count}
        return np.full(1, self.count, np.float32), info

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count, self.resets = self.start, self.resets + 1
        return self._now()

    def step(self, action):
        self.count += 1
        obs, info = self._now()
        return obs, 1.0, self.count == 3, False, info


class Parts(gymnasium.Env):
    """Observations and actions are dicts, and so is the mask in the infos."""

    observation_space = _s.Dict(speed=_s.Box(0, 1, (1,)))
    action_space = _s.Dict([("b", _s.MultiDiscrete([2, 1])), ("a", _s.Discrete(2)), ("force", _s.Box(-1, 1, (1,)))])

    def reset(self, *, seed=None, options=None):
        mask = {"b": (np.array([1, 1]), np.array([0])), "a": np.array([1, 0])}
        return {"speed": np.zeros(1, np.float32)}, {"action_mask": mask}


class Observed(gymnasium.Env):
    """The mask is part of the observation."""

    observation_space = _s.Dict(observation=_s.Box(0, 1, (2,)), action_mask=_s.Box(0, 1, (3,), np.int8))
    action_space = _s.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return {"observation": np.zeros(2, np.float32), "action_mask": np.array([1, 0, 1], np.int8)}, {}
