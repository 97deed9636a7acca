"""Every example runs, and does what its docstring says. An example without an entry here fails."""

import importlib.util
from pathlib import Path

import jax
import numpy as np
import pytest
from cases import some_quick

from jrl import registry

FOLDER = Path(__file__).parent.parent / "examples"


def train_and_save(main, out):
    found = main(3, str(out / "saved"))
    assert (out / "saved").is_dir() and len(found) == 3


def one_episode(main, out):
    assert main(20) > 60  # a random policy makes about 20 steps


def self_play(main, out):
    rows, move = main(8_000)
    assert len(rows) == 2 and rows[-1]["size"] >= 2 and 0 <= rows[-1]["win_rate"] <= 1 and 0 <= move < 9


def league(main, out):
    found = main(20)
    assert found[:3] == ["main", "main_exploiter", "league_exploiter"]
    assert any("_v" in name for name in found) and len(found) <= 9


def memory_tracking(main, out):
    found = main(2)
    assert 20 < found["memory/rss_mb"] < 100_000 and found["memory/live_arrays"] > 10 and found["memory/device_mb"] > 0


def weights(main, out):
    assert main() == ([0], True)


def observations(main, out):
    found = main()
    assert found["Pong-v5"] == ((4, 84, 84), (8, 8, 4, 32))
    assert found["FrozenLake-v1"] == ((), (16, 64))  # sixteen fields, one-hot


def action_distribution(main, out):
    found = main()
    assert found["actions"].shape == (2,)
    np.testing.assert_allclose(found["probabilities"].sum(-1), 1.0, rtol=1e-5)


def q_values(main, out):
    q, value, greedy = main(2)
    np.testing.assert_allclose(value, q.max(-1), rtol=1e-5)
    assert greedy.tolist() == q.argmax(-1).tolist()


def custom_metric(main, out):
    for row in main(1):
        assert 0.0 < row["pole_angle_min"] < row["pole_angle_mean"] < row["pole_angle_max"] < 0.2095


def several_callbacks(main, out):
    best, gaps = zip(*main(2))
    assert list(best) == sorted(best) and all(gap > 0 for gap in gaps)


def callbacks_in_program(main, out):
    found = main()
    assert found["without"] < -1.5 and found["with"] > 0.3  # -2 is 200 steps without the end, 0.53 the shortest way


def curriculum(main, out):
    last, mean = main(40)
    assert last in (4, 48.0) and mean > 0.4  # the fifth level; 48 fields


def curriculum_train_loop(main, out):
    history = main()
    tasks = [task for tasks, _ in history for task in tasks]
    assert len(tasks) == len(history)  # the same everywhere
    assert tasks == sorted(tasks) and tasks[-1] == 2 and history[-1][1] > 9.0


def custom_evaluation(main, out):
    last = main(4)[-1]
    assert last["length_4/steps"] == 4.0 and last["length_7/steps"] == 7.0
    np.testing.assert_allclose([last["length_4/return"], last["length_7/return"]], [0.97, 0.94], rtol=1e-5)


def parallel_evaluation(main, out):
    for row, found in main(3):
        assert found["weights_version"] == row - 1 and found["num_episodes"] == 10


def custom_exploration(main, out):
    right, (left_chosen, right_chosen) = main()
    assert right == 16
    assert 60 < left_chosen < 140 and left_chosen + right_chosen == 1000  # half of epsilon 0.2


def custom_loss(main, out):
    without, decayed, reported = main(8)
    assert decayed < 0.9 * without
    assert abs(reported - decayed) < 0.1 * decayed


def symmetry(main, out):
    mean_return, error = main(4)
    assert -2000 < mean_return < 0 < error < 0.1


def backdate_rewards(main, out):
    found = main()
    assert found["as paid"] < 20 < 30 < found["backdated"] <= 38


def training_step(main, out):
    passes, _ = main(4)
    assert all(p in range(1, 6) for p in passes) and max(passes) > 1


def global_counter(main, out):
    counted, steps = main()
    assert counted > 0 and counted % 20 == 0
    assert 0 <= steps - counted < 4 * 20  # of each environment, what the episode under way has made is not told yet


def functions(main, out):
    found = main(20)
    assert found["four seeds"].shape == (4,) and found["three learning rates"].shape == (3,)
    assert found["one seed"] > 60
    devices = found[f"{jax.local_device_count()} devices"]
    assert devices.shape == (jax.local_device_count(),) and min(devices) > 40


def replay(main, out):
    played, stayed = main(2)
    assert stayed and played[-1] > 40


def custom_network(main, out):
    found = main(15)
    assert {kind: count for kind, (count, _) in found.items()} == {"linen": 2432, "nnx": 320, "functions": 256}
    assert all(mean > 45 for _, mean in found.values())


CHECKS = {
    "train_and_save": train_and_save,
    "one_episode": one_episode,
    "weights": weights,
    "observations": observations,
    "action_distribution": action_distribution,
    "q_values": q_values,
    "symmetry": symmetry,
    "custom_metric": custom_metric,
    "several_callbacks": several_callbacks,
    "callbacks_in_program": callbacks_in_program,
    "curriculum_env_task": curriculum,
    "curriculum_callback": curriculum,
    "curriculum_train_loop": curriculum_train_loop,
    "custom_evaluation": custom_evaluation,
    "parallel_evaluation": parallel_evaluation,
    "custom_exploration": custom_exploration,
    "custom_loss": custom_loss,
    "custom_network": custom_network,
    "backdate_rewards": backdate_rewards,
    "training_step": training_step,
    "global_counter": global_counter,
    "functions": functions,
    "replay": replay,
    "self_play": self_play,
    "league": league,
    "memory_tracking": memory_tracking,
}
QUICK = ("several_callbacks",)  # the mechanisms of all others have quick tests elsewhere
ELSEWHERE = (
    "tune_",
    "reinforce",
    "own_dqn",
    "serve_",
)  # tests/api/test_tune.py, test_docs.py, serve/test_serving_page.py run those


@pytest.fixture(autouse=True)
def _names_of_its_own(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})  # what one example registers is not the next one's


def load(name):
    spec = importlib.util.spec_from_file_location(f"examples_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_run():
    assert {p.stem for p in FOLDER.glob("*.py") if not p.stem.startswith(ELSEWHERE)} == set(CHECKS)


def test_every_example_is_in_the_readme():
    text = (FOLDER / "README.md").read_text()
    assert [p.name for p in FOLDER.glob("*.py") if f"({p.name})" not in text] == []


@pytest.mark.parametrize("name", some_quick(CHECKS, *QUICK))
def test_example(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # of runs/
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", jax.config.jax_compilation_cache_dir)
    CHECKS[name](load(name).main, tmp_path)
    assert capsys.readouterr().out  # it prints what it shows


@pytest.mark.slow
@pytest.mark.parametrize("name, args", [("weights", (2,)), ("curriculum_train_loop", (60, 2))])
def test_example_with_env_runners(name, args, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if name == "weights":
        assert load(name).main(*args) == ([1, 2], True)
    else:
        curriculum_train_loop(lambda: load(name).main(*args), tmp_path)
