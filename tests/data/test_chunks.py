"""Data sets of action chunks: every window of steps of an episode, as the plain record has it."""

import dataclasses

import jax
import numpy as np
import pytest
from test_from_data import GAMMA, buffer_of, run_config, store

from jrl import config, data
from jrl.data.chunks import chunk
from jrl.errors import InputError
from jrl.types import Box

TORQUE = Box((1,), "float32", -2.0, 2.0)


def windows(held, length):
    """Every start of a window: {row: (episode, whether the episode ends there)}."""
    found = {}
    for e in range(held.num_episodes):
        first, last = int(held.offsets[e]), int(held.offsets[e + 1]) - 1
        found |= {row: (e, row + length == last) for row in range(first, last - length + 1)}
    return found


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_transitions_are_all_windows_inside_of_an_episode(length):
    """Each window once, with its actions in order, the sum of its rewards, and the ends of its last step only."""
    held = store(action=TORQUE)
    found, want = chunk(held, length), windows(held, length)
    assert found.action_space == Box((length, 1), "float32", -2.0, 2.0) and found.columns == {}
    seen = []
    for episode in found.episodes():
        steps = len(episode.reward)
        for t in range(steps):
            row = int(episode.obs[t, 0])
            seen.append(row)
            np.testing.assert_array_equal(episode.action[t], held.action[row : row + length])
            np.testing.assert_allclose(episode.reward[t], held.reward[row : row + length].sum(), rtol=1e-6)
            assert episode.obs[t + 1, 0] == row + length
            e, is_end = want[row]
            assert episode.labels["number"] == e
            ends = (held.terminated[e], held.truncated[e]) if is_end else (False, False)
            assert (episode.terminated and t == steps - 1, episode.truncated and t == steps - 1) == ends
    assert sorted(seen) == sorted(want)
    assert not found.action[found.offsets[1:] - 1].any() and not found.reward[found.offsets[1:] - 1].any()


def test_a_run_samples_the_windows_of_its_data(tmp_path):
    """Without an environment: actions in [-1, 1], the discount of three steps, no bootstrap after a termination."""
    held = store(action=TORQUE)
    path = str(data.write(held, tmp_path / "set"))
    cfg = run_config(path, "env.action_chunk=3", "replay.batch_size=256", algo={"name": "fql", "gamma": GAMMA})
    buffer, parts, _ = buffer_of(config.discount_by_action(cfg))
    batch, want, seen = jax.device_get(jax.jit(buffer.sample)(parts[0], jax.random.key(0))), windows(held, 3), set()
    for i in np.flatnonzero(batch.weight):
        row = int(batch.obs[i, 0])
        e, is_end = want[row]
        seen.add(row)
        np.testing.assert_allclose(batch.action[i], held.action[row : row + 3] / 2, rtol=1e-6)
        np.testing.assert_allclose(batch.reward[i], held.reward[row : row + 3].sum(), rtol=1e-5)
        assert batch.next_obs[i, 0] == row + 3
        np.testing.assert_allclose(batch.discount[i], 0.0 if is_end and held.terminated[e] else GAMMA**3, rtol=1e-6)
    assert seen == set(want)


def test_what_cannot_be_chunked_is_refused(tmp_path):
    held = store(action=TORQUE)
    with pytest.raises(InputError, match=r"env.action_chunk: expected episodes of 13 steps or more, got at most 12"):
        chunk(held, 13)
    path = str(data.write(dataclasses.replace(held, columns={}), tmp_path / "set"))
    for override, algo, message in (
        ("data.validation=0.5", "fql", "data.validation: with env.action_chunk several episodes have the steps of one"),
        ("data.estimate={}", "iql", "data.estimate: with env.action_chunk several episodes have the steps of one"),
        ("network.hidden=[8]", "marwil", "env.action_chunk: marwil learns from returns to the end of an episode"),
        ("network.hidden=[8]", "dt", "env.action_chunk: dt learns from returns to the end of an episode"),
    ):
        with pytest.raises(InputError, match=message):
            run_config(path, "env.action_chunk=3", override, algo={"name": algo})
