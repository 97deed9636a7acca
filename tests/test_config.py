"""jrl.config: YAML <-> dataclasses, the wording of every error, the command."""

import dataclasses
import itertools
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from jrl import algos, config, envs
from jrl.config import (
    EnvConfig,
    InputError,
    NetworkConfig,
    RunConfig,
    from_dict,
    load,
    merge,
    sb3_names,
    to_dict,
    to_yaml,
)
from jrl.config import __main__ as config_command
from jrl.fields.bounds import Count, Schedule, Unit


@dataclasses.dataclass(frozen=True)
class PPO:
    lr: Schedule = 3e-4  # step size of Adam
    gamma: Unit = 0.99  # discount
    clip_eps: Schedule = 0.2
    target_kl: float | None = None
    num_epochs: int = 4
    num_minibatches: Count = 4

    def validate(self):
        return ["target_kl must be above 0"] if self.target_kl is not None and self.target_kl <= 0 else []


@dataclasses.dataclass(frozen=True)
class Adam:
    eps: float = 1e-8
    beta: float = 0.9


@dataclasses.dataclass(frozen=True)
class DQN:
    lr: float = 1e-4
    n_step: int = 1
    epsilon: Schedule = ((0.0, 1.0), (1e4, 0.05))
    optimizer: Adam = Adam(eps=1e-5)


ALGOS = {"ppo": PPO, "dqn": DQN}
BASE = {"algo": {"name": "ppo"}, "env": {"id": "CartPole-v1"}, "stop": {"env_steps": 100_000}}


@pytest.fixture
def fakes(monkeypatch):
    """Replaces the registered algorithms by ALGOS."""
    monkeypatch.setattr(algos, "_MODULES", dict.fromkeys(ALGOS, __name__))
    monkeypatch.setattr(algos, "get_config_class", ALGOS.__getitem__)


def made(**changes):
    return from_dict(merge(BASE, changes))


def errors(**changes):
    with pytest.raises(InputError) as e:
        made(**changes)
    return list(e.value.errors)


@pytest.fixture
def ppo_yaml(tmp_path):
    path = tmp_path / "ppo.yaml"
    path.write_text(
        textwrap.dedent("""\
        algo: {name: ppo, lr: 1e-3}
        env:
          id: CartPole-v1
          options: {frame_skip: 4}
        stop: {env_steps: 1e5, episode/return: 475}
        """)
    )
    return path


# ---------------------------------------------------------------- reading and writing


def test_defaults(fakes):
    cfg = made()
    assert cfg == RunConfig(algo=PPO(), env=EnvConfig("CartPole-v1"), stop={"env_steps": 100_000})
    assert cfg.network == NetworkConfig() and hash(cfg.network) == hash(NetworkConfig())


FULL = {
    "algo": {"name": "dqn", "epsilon": [[0, 1.0], [500, 0.1]], "optimizer": {"beta": 0.5}},
    "env": {
        "id": "Pong-v5", "clip_rewards": [-1, 1.5], "num_envs": 16,
        "options": {"a": {"b": [1, "1e-3", 1e-7, "yes", None, "two\nlines"]}, "c": {}, "x: y": ".5e1"},
    },
    "network": {"hidden": [256, 128, 64], "dtype": "bfloat16"},
    "run": {"log": ["jsonl"], "out": "runs/x"},
    "devices": {"actors": [0], "learners": [1, 2], "fake": None},
    "env_runners": {"num": 0, "custom_resources": {"fast": 0.5}, "placement": "SPREAD"},
    "stop": {"env_steps": 10_000, "episode/return": 19.5},
}  # fmt: skip


def test_round_trip(tmp_path, fakes):
    cfg = from_dict(FULL)
    assert cfg.algo == DQN(epsilon=((0.0, 1.0), (500.0, 0.1)), optimizer=Adam(eps=1e-5, beta=0.5))
    assert cfg.env.clip_rewards == (-1.0, 1.5)
    assert cfg.env.options == FULL["env"]["options"]
    assert from_dict(to_dict(cfg)) == cfg
    for number, text in enumerate([to_yaml(cfg), to_yaml(cfg, origins={})]):
        path = tmp_path / f"{number}.yaml"
        path.write_text(text)
        assert load(path) == cfg


def test_clip_rewards_takes_its_five_forms(fakes):
    for given, wanted in [(None, None), (True, True), (False, False), (2, 2.0), ([-1, 2], (-1.0, 2.0))]:
        got = made(env={"clip_rewards": given}).env.clip_rewards
        assert got == wanted and type(got) is type(wanted)


def test_former_keys_of_norms_are_read():
    """Former keys are read in files, in a config's data and on the command line, which has the last word."""
    network = lambda **given: made(network=given).network
    assert network(layer_norm=True).norm == "layer" and network(layer_norm=False).norm == "none"
    old = network(layer_norm=False, critic_layer_norm=True)
    assert (old.norm, old.critic_norm) == ("none", "layer")
    data = {"algo": {"name": "ppo"}, "env": {"id": "CartPole-v1"}, "network": {"critic_layer_norm": True}}
    assert config.override(data, ["network.critic_layer_norm=false"]).network.critic_norm is None
    policies = {"shared": {"network": {"layer_norm": True}}}
    several = config.override({**data, "multi_agent": {"policies": policies, "capacity": 3}}, [])
    assert several.multi_agent.policies == {"shared": {"network": {"norm": "layer"}}}
    assert config.override(data, ["network.critic_norm=none"]).network.critic_norm == "none"


def test_former_names_of_choices_are_read():
    cfg = made(env={"backend": "graph"}, rollout={"collector": "graph"})
    assert (cfg.env.backend, cfg.rollout.collector) == ("jax", "program")
    assert envs.resolve("CartPole-v1", "graph") == "jax"


def test_coercion_by_annotation(fakes):
    cfg = made(algo={"lr": "1e-3", "num_epochs": "8", "gamma": 1}, rollout={"length": 64.0}, network={"hidden": [32.0]})
    assert (cfg.algo.lr, cfg.algo.num_epochs, cfg.rollout.length, cfg.network.hidden) == (1e-3, 8, 64, (32,))
    assert type(cfg.algo.gamma) is float and type(cfg.rollout.length) is int
    steps = made(stop={"env_steps": 3e5}).stop["env_steps"]
    assert steps == 300_000 and type(steps) is int


@pytest.mark.parametrize("name", sorted(sb3_names.ALGORITHMS))
def test_the_answer_to_an_algorithm_of_another_library_can_be_typed(name):
    with pytest.raises(InputError) as e:
        load(None, algo=name.upper(), env="CartPole-v1", stop=["env_steps=100000"])
    (message,) = e.value.errors
    answer = message.partition(f"got '{name.upper()}': ")[2]
    words = answer[answer.rindex("--algo ") :].split()
    sets = [key for flag, key in itertools.pairwise(words) if flag == "--set"]
    load(None, sets, algo=words[1], env="CartPole-v1", stop=["env_steps=100000"])


def test_schedules_by_the_progress_of_the_run():
    """A line to 0 as rl-zoo3 writes it, and points in fractions of the run, become steps of its budget."""
    read = lambda *sets, stop=("env_steps=2e5",): load(None, sets, algo="dqn", env="CartPole-v1", stop=stop)
    assert read("algo.lr=lin_0.0003").algo.lr == ((0, 3e-4), (200_000, 0))
    assert read("algo.lr=[[0, 1e-3], [0.25, 1e-4], [1.0, 0]]").algo.lr == ((0, 1e-3), (50_000, 1e-4), (200_000, 0))
    cfg = read(
        "algo.exploration.epsilon=[[0, 1], [0.1, 0.05]]",
        "replay.prioritized=true",
        "replay.priority_beta=[[0, 0.4], [1, 1]]",
    )
    assert cfg.algo.exploration.epsilon == ((0, 1), (20_000, 0.05))
    assert cfg.replay.priority_beta == ((0, 0.4), (200_000, 1))
    assert load(to_dict(cfg)) == cfg  # a run that is continued to another budget keeps its schedules
    agents = {"policies": {"a": {"algo": {"lr": "lin_0.1"}}}, "mapping": {".*": "a"}}
    assert made(multi_agent=agents).multi_agent.policies["a"]["algo"]["lr"] == [[0, 0.1], [100_000, 0]]
    for given in ("lin_0.0003", "[[0, 1e-3], [1, 0]]"):
        with pytest.raises(InputError, match=r"algo\.lr: .*stop\.env_steps"):
            read(f"algo.lr={given}", stop=())


def test_algo_name_is_in_the_data_once_also_where_the_config_has_the_field(monkeypatch, fakes):
    @dataclasses.dataclass(frozen=True)
    class Named:
        name: str = "mine"
        lr: float = 0.1

    monkeypatch.setitem(ALGOS, "mine", Named)
    monkeypatch.setitem(algos._MODULES, "mine", __name__)
    cfg = from_dict({**BASE, "algo": {"name": "MINE", "lr": 1}})
    assert cfg.algo == Named(lr=1.0)
    assert to_dict(cfg)["algo"] == {"name": "mine", "lr": 1.0}


def test_a_mix_of_inputs_is_one_value():
    rlpd = Path(__file__).parent.parent / "configs" / "rlpd.yaml"
    mixed = config.load(rlpd, ["data.input={sampler: 0.25, sets/mine: 0.75}"]).data.input
    assert mixed == {"sampler": 0.25, str(Path("sets/mine").absolute()): 0.75}
    shipped = config.load(rlpd, ["data.input.sampler=0.75"]).data.input
    assert shipped[str(Path("runs/data/halfcheetah-medium").absolute())] == 0.5
    later = ["data.input.mine=1", "data.input={sampler: 0.5, x: 0.5}"]
    assert config.load(rlpd, later).data.input == {"sampler": 0.5, str(Path("x").absolute()): 0.5}


def test_overrides(ppo_yaml, fakes):
    cfg = load(
        ppo_yaml,
        ["algo.gamma=9e-1", "network.hidden=[8, 8]", "env.options.extra=1e-3", "algo.clip_eps=[[0, 0.2], [1e5, 0]]"],
        env="Acrobot-v1",
        stop=["episode/return=100"],
        out="runs/here",
    )
    assert cfg.algo == PPO(lr=1e-3, gamma=0.9, clip_eps=((0.0, 0.2), (1e5, 0.0)))
    assert cfg.network.hidden == (8, 8)
    assert cfg.env == EnvConfig("Acrobot-v1", options={"frame_skip": 4, "extra": 1e-3})
    assert cfg.stop == {"env_steps": 100_000, "episode/return": 100}
    assert cfg.run.out == str(Path("runs/here").absolute())


# ---------------------------------------------------------------- errors, each with its full text


def test_missing_keys_and_their_mends(fakes):
    with pytest.raises(InputError) as e:
        load(None, ["stop.env_step=5"])
    assert list(e.value.errors) == [
        "algo.name is missing: expected one of ppo, dqn",
        "env.id is missing: expected the name of an environment, such as CartPole-v1",
        "stop.env_steps is missing: every run needs an end: rename stop.env_step",
    ]


def test_all_errors_at_once_of_keys_types_and_checks(fakes):
    found = errors(algo={"learning_rate": 1, "gamma": 2}, env={"num_envs": "many"}, run={"seed": -1})
    assert found == [
        "unknown key algo.learning_rate: did you mean algo.lr?",
        "algo.gamma: expected a number in [0, 1], got 2: its default is 0.99",
        "env.num_envs: expected a whole number in [1, 16777216], got 'many'",
        "run.seed: expected a whole number of at least 0, got -1: its default is 0",
    ]


def test_no_check_speaks_of_the_default_of_a_broken_key(fakes):
    # 8 envs (the default) x 100 steps do not divide by 3, but the user did not say 8.
    assert errors(env={"num_envs": "x"}, rollout={"length": 100}, algo={"num_minibatches": 3}) == [
        "env.num_envs: expected a whole number in [1, 16777216], got 'x'"
    ]
    assert errors(env=8, devices={"fake": 3})[0] == "env: expected a mapping, got 8"
    assert not any("divisible" in e for e in errors(env=8, devices={"fake": 3}))


def test_a_malformed_override_hides_no_other_error():
    with pytest.raises(InputError) as e:
        load(None, ["a..b=1", "run.seed=x"], algo="ppo", env="E", stop=["env_steps=1"])
    assert [error.partition(":")[0] for error in e.value.errors] == ["--set a..b=1", "run.seed"]


def test_files_that_are_no_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "ppo_atari.yaml").write_text("")
    (tmp_path / "list.yaml").write_text("[1, 2]")
    (tmp_path / "broken.yaml").write_text("a:\n  b: [1\n")

    def message(name):
        with pytest.raises(InputError) as e:
            load(name)
        return str(e.value)

    assert message("ppo_atary.yaml") == "ppo_atary.yaml: there is no such file: did you mean configs/ppo_atari.yaml?"
    assert message("zzz.yaml") == "zzz.yaml: there is no such file"
    assert message("list.yaml") == "list.yaml: expected a mapping of keys such as 'rollout:', got [1, 2]"
    assert message("broken.yaml").startswith("broken.yaml: not valid YAML at line 3, column 1: ")
    assert "expected ',' or ']'" in message("broken.yaml")
    assert message("configs") == f"config: {tmp_path}/configs: expected a file, got a directory: choose another path"


# ---------------------------------------------------------------- python -m jrl.config


def test_show_tells_the_origin_of_each_value_and_loads_again(ppo_yaml, tmp_path, fakes, capsys):
    args = ["--set", "algo.gamma=0.9", "--env", "Acrobot-v1", "--stop", "episode/return=1"]
    assert config_command.main(["show", str(ppo_yaml), *args]) == 0
    shown = capsys.readouterr().out
    lines = {line.split("  # ")[0].strip(): line.split("  # ")[1] for line in shown.splitlines() if "  # " in line}
    assert lines["name: ppo"] == "file"
    assert lines["lr: 0.001"] == "file; step size of Adam"
    assert lines["gamma: 0.9"] == "--set; discount; in [0, 1]"
    assert lines["clip_eps: 0.2"] == "default"
    assert lines["id: Acrobot-v1"].startswith("--env; ")
    assert lines["frame_skip: 4"] == "file"
    assert lines["num_envs: 8"] == "default; environments in total, over all devices; in [1, 16777216]"
    assert lines["env_steps: 100000"] == "file"
    assert lines["episode/return: 1"] == "--stop"
    again = tmp_path / "again.yaml"
    again.write_text(shown)
    changed = ["algo.gamma=0.9", "env.id=Acrobot-v1", "stop.episode/return=1"]
    assert load(again) == load(ppo_yaml, changed)


def test_show_after_another_algo_names_no_dropped_origin(ppo_yaml, fakes, capsys):
    assert config_command.main(["show", str(ppo_yaml), "--algo", "dqn"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split("# ")[1] for line in shown if line.strip().startswith("lr: ")] == ["default"]
    assert [line.split("# ")[1] for line in shown if line.startswith("  name: ")] == ["--algo"]


def test_validate_prints_the_plan_and_asks_the_environments(ppo_yaml, capsys):
    ppo_yaml.write_text(ppo_yaml.read_text().replace("{frame_skip: 4}", "{}"))
    assert config_command.main(["validate", str(ppo_yaml)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "8 envs x 128 steps = 1,024 transitions per iteration",
        "4 epochs x 4 minibatches of 256 transitions = 16 updates per iteration",
        "98 iterations until stop.env_steps 100,000",
        "ok",
    ]


def test_bad_input_is_exit_status_2(ppo_yaml, fakes, capsys):
    assert config_command.main(["show", str(ppo_yaml), "--set", "algo.gama=1"]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", "unknown key algo.gama: did you mean algo.gamma?\n")


def test_import_is_light():
    heavy = ["jax", "flax", "envpool", "gymnasium", "pydantic", "numpy"]
    code = f"import sys, jrl.config; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_names_that_rllib_users_give_the_ends_of_a_run():
    cfg = load(
        None, algo="ppo", env="CartPole-v1", stop=["num_env_steps_sampled_lifetime=3000", "episode_reward_mean=9"]
    )
    assert cfg.stop == {"env_steps": 3000, "episode/return": 9}
    cfg = load(None, algo="ppo", env="CartPole-v1", stop=["training_iteration=30"])  # of 8 x 128 rows
    assert (cfg.stop, cfg.run.report_every) == ({"env_steps": 30 * 1024}, 1024)
    cfg = load(None, ["run.report_every=4000"], algo="ppo", env="CartPole-v1", stop=["training_iteration=2"])
    assert cfg.stop == {"env_steps": 8000}


def test_an_algorithm_of_the_users_own(tmp_path, monkeypatch):
    project = tmp_path / "own_project"
    project.mkdir()
    (project / "mine.py").write_text(
        "from jrl.algos import ppo\n"
        "from jrl.types import hyperparams\n"
        "@hyperparams\n"
        "class Config(ppo.Config):\n"
        "    patience: float = 2.0  # of its own\n"
        "make = ppo.make\n"
    )
    (project / "borrowed.py").write_text("from jrl.algos.ppo import Config, make\n")
    monkeypatch.syspath_prepend(tmp_path)
    cfg = load(None, ["algo.patience=3"], algo="own_project.mine", env="CartPole-v1", stop=["env_steps=9"])
    assert cfg.algo.patience == 3 and to_dict(cfg)["algo"]["name"] == "own_project.mine"
    assert from_dict(to_dict(cfg)) == cfg
    for name, message in {
        "own_project.borrowed": "its Config is that of jrl.algos.ppo",
        "own_project.nothing": "cannot be imported",
        "jrl.config.plan": "an algorithm is a module with a dataclass Config",
    }.items():
        with pytest.raises(InputError, match=message):
            load(None, algo=name, env="CartPole-v1", stop=["env_steps=9"])
