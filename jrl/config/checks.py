"""The table of refused combinations of config keys, each with its fix.

To refuse another combination, add a row: the keys, the condition, the message with its fix. The checks read only
attributes of the config.
"""

import difflib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from jrl.config import datasets
from jrl.config.datasets import SAMPLER, shares
from jrl.config.plan import Sizes, divisors
from jrl.errors import counted, short
from jrl.fields import bounds, validation
from jrl.fields import env as environments
from jrl.fields.data import RETURN_TO_GO, DataSets, Fresh, learns_from, traits
from jrl.fields.env import ASYNCHRONOUS, PROCESSES
from jrl.fields.validation import Row, refused

Fault = tuple[tuple[str, ...], str]  # (keys that the check read, message)

# section of a result row -> its metrics, the most common stop criteria first
_SCORES = {
    "episode": ("return", "length", "return_min", "return_max", "return_p10", "return_p90", "count", "window"),
    "evaluation": (
        "return", "length", "return_min", "return_max", "return_std", "length_std", "episodes", "timesteps",
        "weights_version", "timed_out", "time_s", "num_healthy_workers",
    ),
}  # fmt: skip
_METRICS = (
    "env_steps",
    "iteration",
    "updates",
    "time_s",
    "timestamp",
    *(f"{k}/{n}" for k in _SCORES for n in _SCORES[k]),
)


def faults(cfg: Any) -> Iterator[Fault]:
    """Yields a fault for each refused combination of values."""
    yield from refused(TABLE, cfg)
    yield from split_faults(cfg, Sizes(cfg).learners)


def split_faults(cfg: Any, learners: int) -> Iterator[Fault]:
    """Yields a fault for each size that `learners` devices, and the collecting devices or runners, cannot split."""
    yield from refused(SPLITS, cfg, learners)


def command_faults(cfg: Any) -> Iterator[Fault]:
    """Yields a fault for each key that only commands need: an end of the run, and evaluations for its metrics."""
    yield from refused(COMMANDS, cfg)
    for key, name in (
        {f"stop.{n}": n for n in cfg.stop} | {"checkpoint.keep_best_by": cfg.checkpoint.keep_best_by}
    ).items():
        # the default of keep_best_by needs no evaluations: without them there is no best checkpoint
        if name is not None and (fault := metric_fault(cfg, key, name, evaluated=key.startswith("stop."))):
            more = ("evaluation.every", "evaluation.interval") if name.startswith("evaluation/") else ()
            yield (key, *more), fault


def evaluates(cfg: Any) -> bool:
    """Returns whether a run is evaluated during training."""
    return bool(cfg.evaluation.every or cfg.evaluation.interval)


def _tenth(cfg: Any) -> int:
    return max(1, int(cfg.stop.get(Sizes(cfg).counts_by) or 0) // 10)


def metric_fault(cfg: Any, key: str, name: str, *, evaluated: bool = True) -> str:
    """Returns a message if no result row can have the metric; "" if a row, or the user's code, may add it.

    Args:
      cfg: config of the run.
      key: config key with the name.
      name: name of the metric.
      evaluated: metrics of evaluations need evaluations.
    """
    if any(vars(cfg.custom).values()) or not type(cfg.algo).__module__.startswith("jrl."):
        return ""
    if evaluated and name.startswith("evaluation/") and not evaluates(cfg):
        return f"{key}: there are no evaluations: set evaluation.every={_tenth(cfg)}"
    if "/" in name and name.split("/")[0] not in _SCORES:
        return ""
    if name in ("evaluation/elo", "evaluation/elo_se"):
        return "" if cfg.evaluation.elo_games else f"{key}: there are no ratings: set evaluation.elo_games=64"
    if name.startswith(("evaluation/agent/", "evaluation/policy/")) and name.endswith("/return"):
        return ""  # names of agents and policies are not known before the environments
    return missing_metric(key, name, _METRICS)


def missing_metric(key: str, name: str, rows: Sequence[str]) -> str:
    """Returns a message if result rows with keys `rows` lack the metric `name`; "" if they have it or later will."""
    if name in rows or name in _METRICS:
        return ""
    near = [k for k in rows if k.endswith(f"/{name}")][:2] or difflib.get_close_matches(name, rows, 1)
    hint = f"did you mean {' or '.join(near)}?" if near else "use a key such as episode/return or evaluation/return"
    return f"{key}: expected a key of the result rows, got {short(name)}: {hint}"


def _value(cfg: Any, key: str) -> Any:
    for name in key.split("."):
        cfg = None if cfg is None else getattr(cfg, name)
    return cfg


# values that change nothing
_UNSET: tuple[Any, ...] = (None, False, 0, (), {}, "sync", "auto", "device", "truncate_episodes", "independent")


def _excluded(cause: str, when: Callable[[Any], Any], reasons: Mapping[str, str], message: str) -> list[Row]:
    """Returns a row for each excluded key of `reasons` (key -> why); `message` has {key}, {why} and {name}."""

    def row(key: str, why: str) -> Row:
        is_set = lambda c: when(c) and _value(c, key) not in _UNSET
        return Row(f"{cause} {key}", lambda c: is_set(c) and message.format(key=key, why=why, name=_name(c)))

    return [row(key, why) for key, why in reasons.items()]


def _name(cfg: Any) -> str:
    return type(cfg.algo).__module__.rpartition(".")[2]


# ---------------------------------------------------------------- data sets

_OF_DATA_ALONE = f"{{key}}: it is for runs that learn from data.input alone, and data.input names {SAMPLER}: {{why}}"


def _input_fault(cfg: Any) -> str:
    """Returns the message about a faulty `data.input`; "" if it is valid or not set."""
    kind, value, inputs = learns_from(cfg.algo), cfg.data.input, shares(cfg.data)
    if kind is DataSets and (value is None or SAMPLER in inputs):
        fix = "set it, e.g. data.input=runs/data/cartpole-expert" if value is None else f"leave {SAMPLER} out"
        return f"data.input: {_name(cfg)} learns from a data set alone: {fix}"
    if value is not None and (not inputs or not all(inputs)):
        return "data.input: expected a path, a list of paths, or {path: share}, got nothing: give a path"
    if set(inputs) == {SAMPLER}:
        return f"data.input: {SAMPLER} alone is a run without data: leave data.input out"
    if value is not None and kind is Fresh:
        fix = "use bc, marwil, iql, or sac, td3 or dqn with their flags for data sets"
        return f"data.input: {_name(cfg)} learns from its own rollouts: {fix}"
    return ""


def _has_data(cfg: Any) -> bool:
    return cfg.data.input is not None and not _input_fault(cfg)


def _has_data_alone(cfg: Any) -> bool:
    return _has_data(cfg) and SAMPLER not in shares(cfg.data)


def _is_mixed(cfg: Any) -> bool:
    return _has_data(cfg) and SAMPLER in shares(cfg.data)


def _acts_nowhere(cfg: Any) -> bool:
    return not cfg.env.id and cfg.external is None


# fmt: off
_DATA = (
    Row("data.input algo.name", _input_fault),
    Row("data.estimate data.input", lambda c: c.data.estimate and (c.data.input is None or SAMPLER in shares(c.data)),
        "data.estimate: it is for runs that learn from data.input alone"),
    Row("data.estimate.methods", lambda c: c.data.estimate and not c.data.estimate.methods,
        "data.estimate.methods: expected at least one method, got none: leave data.estimate out"),
    Row("data.estimate algo.top_fraction",
        lambda c: c.data.estimate and (getattr(c.algo, "top_fraction", None) or 1.0) < 1.0,
        "data.estimate: episodes selected by their returns cannot estimate another policy: leave algo.top_fraction or "
        "data.estimate out"),
    Row("data.input env.action_chunk algo.name", lambda c: (
            _has_data(c)
            and c.env.action_chunk > 1
            and (traits(c.algo).to_end or RETURN_TO_GO in traits(c.algo).reads)
            and f"env.action_chunk: {_name(c)} learns from returns to the end of an episode, which windows of its "
            "steps lack: use fql or iql, or leave it out"
        )),
    *(
        Row(f"{key} env.action_chunk", lambda c, part=part: c.env.action_chunk > 1 and getattr(c.data, part),
            f"{key}: with env.action_chunk several episodes have the steps of one: leave one of them out")
        for part, key in (("validation", "data.validation"), ("estimate", "data.estimate"))
    ),
    Row("data.where data.input", lambda c: c.data.where and c.data.input is None and not _input_fault(c),
        "data.where: expected data.input, whose episodes it selects, got null: set data.input, or leave data.where "
        "out"),
    Row("env.id data.input", lambda c: c.data.input is None and not _input_fault(c) and _acts_nowhere(c),
        "env.id is missing: expected the name of an environment, such as CartPole-v1"),
    Row("env.id data.input", lambda c: _is_mixed(c) and _acts_nowhere(c),
        f"env.id is missing: data.input names {SAMPLER}, which acts in environments"),
    Row("replay.prioritized algo.name", lambda c: (
            (_name(c) == "awr" or (learns_from(c.algo) is DataSets and _has_data(c)))
            and c.replay
            and c.replay.prioritized
            and f"replay.prioritized: {_name(c)} has no priorities and draws all rows alike: leave it out"
        )),
    Row("data.input multi_agent", lambda c: (
            _has_data(c)
            and c.multi_agent
            and f"data.input: {_name(c)} learns from a data set, which teaches one policy: leave multi_agent out"
        )),
    Row("data.input replay.batch_size", lambda c: _is_mixed(c) and len(shares(c.data)) > c.replay.batch_size,
        "data.input: there are more inputs than rows of a batch: raise replay.batch_size"),
    *_excluded(
        "data.input",
        _is_mixed,
        {
            "data.validation": "leave it out, and judge by evaluation.every",
            "data.updates_per_iteration": "use replay.updates_per_step, the updates for each environment step",
            "data.placement": "here the data are on the devices, beside replay: leave it out",
        },
        _OF_DATA_ALONE,
    ),
    Row("data.validation_batches data.input",
        lambda c: _is_mixed(c) and c.data.validation_batches != datasets.DataConfig().validation_batches,
        _OF_DATA_ALONE.format(key="data.validation_batches", why="leave it out")),
    *_excluded(
        "data.input",
        _has_data_alone,
        {
            **dict.fromkeys(
                ("env_runners.num", "rollout.mode", "rollout.fake", "rollout.batch_mode"), "nobody collects"
            ),
            "devices.actors": "nobody acts",
            "data.output": "nobody collects",
            "custom.transforms": "there are no rollouts: use custom.batch",
            "custom.reward": "there are no rollouts: use data.reward",
            "custom.training_step": "an iteration is an update",
            "custom.env_task": "there are no environments",
            "external": "nobody plays",
        },
        "{key}: {name} learns from data.input alone, and {why}: leave it out",
    ),
    Row("algo.normalize_reward data.input",
        lambda c: _has_data_alone(c) and getattr(c.algo, "normalize_reward", False),
        "algo.normalize_reward: its statistics need rewards of environments, and the run learns from data.input alone: "
        "use data.reward.normalize"),
    Row("stop data.input", lambda c: (
            _has_data_alone(c)
            and [
                f"stop.{stop}: a criterion is met by a value of at least its number, but a loss falls: leave it out; "
                f"checkpoint.keep_best_by={stop} with checkpoint.keep_best=min keeps the best weights"
                for stop in c.stop
                if stop.startswith("validation/loss")
            ]
        )),
    Row("env.id evaluation.every evaluation.interval", lambda c: (
            _has_data_alone(c)
            and evaluates(c)
            and not datasets.plays(c)
            and not (c.data.estimate and c.data.estimate.every is None)
        ),
        "env.id is missing: evaluations need an environment: set env.id, or leave evaluation.every and "
        "evaluation.interval out, or estimate the policy from data by data.estimate={}"),
    Row("data.placement replay.prioritized",
        lambda c: _has_data_alone(c) and c.data.placement == "host" and c.replay.prioritized,
        "data.placement host: batches are drawn ahead, before the latest priorities are known: use device, or leave "
        "replay.prioritized out"),
)
# fmt: on


# ---------------------------------------------------------------- clients that play


def _own_spaces(cfg: Any) -> list[str]:
    """Returns the keys of spaces that are set in `external`."""
    section = cfg.external
    return [key for key in ("observation", "action") if section is not None and getattr(section, key) is not None]


def _if_external(condition: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda c: c.external is not None and condition(c)


_SENT = "clients send the policy's observations"
_TURNS = "clients step each agent by its own turns, so the rows of a game's agents are not of the same steps"
_PLAYED = "clients play the episodes"
_WITH_EXTERNAL = "{key}: with external {why}: leave it out"
_has_agents = _if_external(lambda c: c.multi_agent is not None or c.external.agents is not None)
SEVERAL_CLIENTS = tuple(
    _excluded(
        "external",
        _has_agents,
        {
            "multi_agent.self_play": _TURNS,
            "multi_agent.group": _TURNS,
            "multi_agent.replay_mode": _TURNS,
            "multi_agent.state": _SENT,
            "multi_agent.observation_fn": _SENT,
            "multi_agent.agent_id": _SENT,
        },
        _WITH_EXTERNAL,
    )
)
# fmt: off
_EXTERNAL_ROWS = (
    Row("external algo.name", lambda c: (
            traits(c.algo).uncorrected
            and f"external: {_name(c)} treats each step as the present policy's, but clients act while weights change: "
            "use ppo, appo or impala, or an algorithm with replay"
        )),
    Row("external algo.name", lambda c: (
            learns_from(type(c.algo)) is DataSets
            and f"external: {_name(c)} learns from a data set alone: use an algorithm that collects"
        )),
    Row("external.spaces external.observation external.action", lambda c: (
            c.external.spaces is not None
            and [
                f"external.spaces names a run that has spaces: leave out external.{key}, or external.spaces"
                for key in _own_spaces(c)[:1]
            ]
        )),
    Row("external.observation external.action", lambda c: c.external.spaces is None and len(_own_spaces(c)) == 1,
        "external: expected observation and action, got one of them: set both, or env.id"),
    Row("external.observation external.action env.id",
        lambda c: c.external.spaces is None and not _own_spaces(c) and not c.env.id,
        "external.observation is missing: set the clients' spaces, e.g. external.observation={box: [4]} and "
        "external.action={discrete: 2}, or name an environment with these spaces as env.id, or a run as "
        "external.spaces"),
    Row("env.id evaluation.every evaluation.interval",
        lambda c: (c.external.spaces or _own_spaces(c)) and not c.env.id and evaluates(c),
        "evaluation: expected env.id, an environment for evaluations, got none: leave evaluation.every and "
        "evaluation.interval out"),
    Row("external.agents external.observation",
        lambda c: c.external.agents is not None and c.external.observation is None,
        "external.agents: expected their spaces in external.observation and external.action, got none: set them, or "
        "leave external.agents out and take the agents of env.id or external.spaces"),
    Row("external.agents", lambda c: (
            c.external.agents is not None
            and not 1 < len(c.external.agents) == len(set(c.external.agents))
            and f"external.agents: expected two different names or more, got {list(c.external.agents)}: leave it out "
            "if an episode has one agent"
        )),
    Row("external.agents evaluation.every evaluation.interval",
        lambda c: c.external.agents is not None and evaluates(c),
        "evaluation: external.agents names agents that env.id does not have: leave evaluation.every and "
        "evaluation.interval out, or leave external.agents, observation and action out, to take the agents of env.id"),
    Row("external.agents multi_agent.agents", lambda c: (
            c.external.agents is not None
            and _value(c, "multi_agent.agents") not in (None, c.external.agents)
            and f"multi_agent.agents: external.agents has {', '.join(c.external.agents)}: leave multi_agent.agents out"
        )),
    Row("external.private_key external.certificate",
        lambda c: c.external.private_key is not None and c.external.certificate is None,
        "external.private_key: expected its certificate, got none: set external.certificate"),
    Row("external env.frame_stack", lambda c: c.env.frame_stack != 1,
        _WITH_EXTERNAL.format(key="env.frame_stack", why=f"{_SENT}: let them stack frames")),
    Row("external env.action_repeat", lambda c: c.env.action_repeat != 1,
        _WITH_EXTERNAL.format(key="env.action_repeat", why=f"{_PLAYED}: let them repeat actions")),
    Row("external env.action_chunk", lambda c: c.env.action_chunk != 1,
        _WITH_EXTERNAL.format(key="env.action_chunk", why=f"{_PLAYED}: let them send actions of several steps")),
)
# fmt: on
_EXTERNAL = (
    *(row._replace(refuses=_if_external(row.refuses)) for row in _EXTERNAL_ROWS),
    *SEVERAL_CLIENTS,
    *_excluded(
        "external",
        lambda c: c.external is not None,
        {
            "env_runners.num": _PLAYED,
            "rollout.mode": "clients are always answered during learning",
            "rollout.batch_mode": "the length of episodes is not known",
            "rollout.collector": _PLAYED,
            "rollout.fake": _PLAYED,
            "env.horizon": "clients end their episodes",
            "env.on_nonfinite": _PLAYED,
            "env.batch_size": "external.max_wait_ms groups requests instead",
            PROCESSES: _PLAYED,
            "env.randomize": _PLAYED,
            "env.observation_noise": f"{_SENT}: let them add noise",
            "env.action_delay": _PLAYED,
            "env.action_mask_info": "clients send masks as action_mask of the observation",
            "network.use_prev_action": _SENT,
            "network.use_prev_reward": _SENT,
            "checkpoint.exact": "clients cannot repeat their episodes",
            "custom.env_task": "there are no environments here",
            "devices.actors": "actions are chosen on the device that learns",
        },
        _WITH_EXTERNAL,
    ),
)


# ---------------------------------------------------------------- the other sections


def _budget_fault(cfg: Any) -> str:
    key = f"stop.{Sizes(cfg).counts_by}"
    steps = cfg.stop.get(Sizes(cfg).counts_by)
    if steps is not None and steps != int(steps):
        return f"{key}: expected a whole number, got {short(steps)}"
    return "" if steps is None else validation.fault(int(steps), bounds.Steps, key)


def _critic_faults(cfg: Any) -> list[str]:
    network = cfg.network
    own = network.critic_torso, network.critic_norm, network.critic_dropout, network.critic_hidden
    if not network.value_inputs and own == (None,) * 4:
        return []
    from jrl import algos

    return algos.critic_faults(cfg.algo, network)


def _regularization_faults(cfg: Any) -> list[str]:
    if not (cfg.network.drops or cfg.network.has_statistics or cfg.network.norm_after_activation):
        return []
    from jrl import algos

    return algos.regularization_faults(cfg.algo, cfg.network)


def _memory_faults(cfg: Any) -> list[str]:
    if not cfg.network.recurrent or traits(cfg.algo).has_memory:
        return []
    from jrl import algos

    return algos.memory_faults(cfg.algo, cfg.network)


def _population_fault(cfg: Any) -> str:
    if not traits(cfg.algo).has_members:
        return ""
    envs, population = cfg.env.num_envs, cfg.algo.population
    members = population or envs
    if envs % members:
        return f"env.num_envs: expected a multiple of algo.population {members}, got {envs}: use {_near(envs, members)}"
    if members > 1 and not (cfg.algo.in_pairs and members % 2):
        return ""
    key, what = "env.num_envs" if population is None else "algo.population", "2 members or more"
    if cfg.algo.in_pairs:
        what = "an even number of members, which are mirrored pairs"
    return f"{key}: expected {what}, got {members}: use {members + 1}"


def _sequence_length_fault(cfg: Any) -> str:
    length, limit = Sizes(cfg).length, Sizes(cfg).sequence_length
    cut = cfg.replay is None and limit > 0 and cfg.rollout.batch_mode == "truncate_episodes"
    if not cut or length % limit == 0 or traits(cfg.algo).whole_sequences:
        return ""
    near = max(n for n in divisors(length) if n <= limit)
    more = -(-length // limit) * limit
    return f"network.max_seq_len {limit} does not divide rollout.length {length}: use {near}, or rollout.length {more}"


def _device_fault(name: str) -> Callable[[Any], str]:
    def fault(cfg: Any) -> str:
        key, indices, fake = f"devices.{name}", getattr(cfg.devices, name), cfg.devices.fake
        if indices is None:
            return ""
        if not indices:
            return f"{key}: expected at least one index, such as [0], or null"
        if name == "learners" and len(set(indices)) < len(indices):
            return f"{key}: expected different indices from 0, got {short(list(indices))}"
        if fake is not None and max(indices) >= fake:
            return f"{key}: {max(indices)} is not among the {fake} of devices.fake"
        return ""

    return fault


def _variable_faults(cfg: Any) -> Iterator[str]:
    for name in cfg.runtime.env:
        if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
            yield f"runtime.env: expected names of environment variables, got {short(name)}: use letters, digits and _"
        elif name.startswith("JAX_"):
            fix = "set it before the command"
            yield f"runtime.env: {name[:80]} is read when jax is imported, before the config is read: {fix}"


# ---------------------------------------------------------------- goals that are learned from in hindsight


def _has_hindsight(cfg: Any) -> bool:
    return cfg.replay is not None and cfg.replay.hindsight is not None


def _noisy_goals(cfg: Any) -> bool:
    noise = cfg.env.observation_noise
    return bool({"achieved_goal", "desired_goal"} & noise.keys() if isinstance(noise, Mapping) else noise)


_HINDSIGHT = (
    *_excluded(
        "replay.hindsight",
        _has_hindsight,
        {
            "multi_agent": "goals are of a single agent",
            "data.input": "goals are new for collected steps only",
            "external": "goals are of environments that are stepped here",
            "network.use_prev_reward": "the previous reward is of the stored goal",
            "custom.transforms": "rewards are computed anew, without transforms",
        },
        "{key}: with replay.hindsight {why}: leave one of them out",
    ),
    Row(
        "replay.hindsight network.core.name",
        lambda c: _has_hindsight(c) and c.network.recurrent,
        "network.core: with replay.hindsight a memory has read the stored goals: leave one of them out",
    ),
    Row(
        "replay.hindsight env.frame_stack",
        lambda c: _has_hindsight(c) and c.env.frame_stack > 1,
        "env.frame_stack: with replay.hindsight goals are not stacked: leave one of them out",
    ),
    Row(
        "replay.hindsight env.action_repeat",
        lambda c: _has_hindsight(c) and c.env.action_repeat > 1,
        "env.action_repeat: with replay.hindsight a reward is of one step: leave one of them out",
    ),
    Row(
        "replay.hindsight env.action_chunk",
        lambda c: _has_hindsight(c) and c.env.action_chunk > 1,
        "env.action_chunk: with replay.hindsight a reward is of one step: leave one of them out",
    ),
    Row(
        "replay.hindsight env.observation_noise",
        lambda c: _has_hindsight(c) and _noisy_goals(c),
        "env.observation_noise: expected exact goals for replay.hindsight: name the noisy items, such as "
        "{observation: 0.1}",
    ),
    Row(
        "replay.hindsight.reward env.randomize",
        lambda c: _has_hindsight(c) and c.env.randomize and c.replay.hindsight.reward is None,
        "replay.hindsight.reward: with env.randomize the environment's own reward may depend on the drawn numbers: set "
        "it to package.module:function",
    ),
)


# fmt: off
_UNEVEN = "environments that do not wait for each other"
TABLE = (
    Row("stop.env_steps stop.updates data.input", _budget_fault),
    *_DATA,
    *_EXTERNAL,
    *_HINDSIGHT,
    Row("algo", lambda c: (
            callable(validate := getattr(c.algo, "validate", None)) and [f"algo: {message}" for message in validate()]
        )),
    Row("checkpoint.exact", lambda c: (
            c.checkpoint.exact
            and c.checkpoint.every is None
            and "checkpoint.exact needs checkpoint.every: checkpoints by the clock cannot repeat their steps: set "
            f"checkpoint.every={_tenth(c)}"
        )),
    Row("network.encoders network.flatten", lambda c: c.network.encoders and c.network.flatten,
        "network.flatten makes one vector of an observation, without encoders: leave network.flatten or "
        "network.encoders out"),
    Row("network.value_inputs network.critic_torso network.critic_norm network.critic_dropout network.critic_hidden "
        "network.shared algo.name", _critic_faults),
    Row("network.torso network.critic_torso network.hidden network.critic_hidden network.norm network.critic_norm "
        "network.dropout network.critic_dropout", lambda c: c.network.torso_faults()),
    Row("algo.teacher", lambda c: traits(c.algo).has_teacher and not c.algo.teacher,
        "algo.teacher: expected the run directory or checkpoint of a trained policy, got null: set it, e.g. "
        "algo.teacher=runs/teacher"),
    *_excluded(
        "algo.teacher",
        lambda c: traits(c.algo).has_teacher,
        {
            "multi_agent": "a teacher has one student",
            "external": "a teacher labels each step while the student acts here",
        },
        "{key}: {name} learns from a teacher, and {why}: leave it out",
    ),
    *_excluded(
        "algo.name",
        lambda c: traits(c.algo).has_members,
        {
            "multi_agent": "the agents of a game would be of different members",
            "external": "clients begin their own episodes",
            "rollout.mode": "a generation waits for the scores of the last",
            "rollout.batch_mode": "its rollouts begin new episodes already",
            "env.batch_size": "all members play for the same number of steps",
            "env.batch_wait_ms": "all members play for the same number of steps",
        },
        "{key}: {name} plays a generation of members in each rollout, and {why}: leave it out",
    ),
    *_excluded(
        "algo.name",
        lambda c: traits(c.algo).searches_env,
        {
            "env_runners.num": "env runners step their environments elsewhere",
            "external": "clients step theirs elsewhere",
            "multi_agent.self_play": "one policy plays both sides already",
            "env.clip_rewards": "its values are sums of the environment's own rewards",
            "custom.reward": "its values are sums of the environment's own rewards",
        },
        "{key}: {name} searches with the environment's step, and {why}: leave it out",
    ),
    Row("algo.name env.reward_scale", lambda c: (
            traits(c.algo).searches_env
            and c.env.reward_scale != 1
            and f"env.reward_scale: expected 1, since {_name(c)} searches with the environment's own rewards, got "
            f"{c.env.reward_scale}: leave it out"
        )),
    Row("algo.name rollout.explore", lambda c: (
            traits(c.algo).has_members
            and not c.rollout.explore
            and f"rollout.explore: {_name(c)} compares members, and without exploration all act as their mean: leave "
            "it out"
        )),
    Row("algo.name evaluation.elo_games", lambda c: (
            c.evaluation.elo_games is not None
            and not traits(c.algo).searches_env
            and f"evaluation.elo_games: expected algo.name alphazero, got {_name(c)}: leave it out; "
            "multi_agent.self_play has ratings without it"
        )),
    Row("evaluation.elo_games", lambda c: (
            (c.evaluation.elo_games or 0) % 2 == 1
            and f"evaluation.elo_games: expected an even number, since each opening is played twice, got "
            f"{c.evaluation.elo_games}: set {c.evaluation.elo_games + 1}"
        )),
    Row("algo.population env.num_envs", _population_fault),
    Row("network.norm network.critic_norm network.dropout network.critic_dropout network.torso network.critic_torso "
        "network.core.name algo.name", _regularization_faults),
    Row("network.core.name algo.name", _memory_faults),
    Row("network.max_seq_len network.core.name",
        lambda c: c.network.max_seq_len is not None and not c.network.recurrent,
        "network.max_seq_len: expected a network with memory, got network.core none: set network.core.name to lstm, "
        "gru, gtrxl or lru, or leave network.max_seq_len out"),
    Row("network.max_seq_len rollout.length", _sequence_length_fault),
    *environments.REFUSED,
    Row(f"rollout.batch_mode {' '.join(ASYNCHRONOUS)}",
        lambda c: c.rollout.batch_mode == "complete_episodes" and not c.env.waits,
        "rollout.batch_mode complete_episodes: environments that do not wait for each other leave rows empty: leave "
        f"{' and '.join(ASYNCHRONOUS)} out"),
    Row("runtime.xla_flags", lambda c: [
            f"runtime.xla_flags: expected --name=value, separated by spaces, got {short(flag)}"
            for flag in (c.runtime.xla_flags or "").split()
            if not flag.startswith("--")  # XLA would end the process
        ]),
    Row("runtime.env", lambda c: list(_variable_faults(c))),
    Row("evaluation.every evaluation.interval",
        lambda c: c.evaluation.every is not None and c.evaluation.interval is not None,
        "evaluation: expected every (environment steps) or interval (result rows), got both: leave one out"),
    Row("evaluation.duration evaluation.parallel",
        lambda c: c.evaluation.duration == "auto" and not c.evaluation.parallel,
        "evaluation.duration auto lasts as long as training in parallel: set evaluation.parallel=true, or a number"),
    Row("evaluation.num_envs evaluation.duration", lambda c: (
            c.evaluation.unit == "episodes"
            and isinstance(c.evaluation.duration, int)
            and (c.evaluation.num_envs or 0) > c.evaluation.duration
            and f"evaluation.num_envs: expected at most evaluation.duration = {c.evaluation.duration} episodes, got "
            f"{c.evaluation.num_envs}: lower it"
        )),
    Row("custom.env_task env.randomize", lambda c: c.custom.env_task and c.env.randomize,
        "custom.env_task: with env.randomize each environment draws its own task: leave one of them out"),
    Row("evaluation.config env.observe_task",
        lambda c: c.env.observe_task and "randomize" in (c.evaluation.config.get("env") or {}),
        "evaluation.config.env.randomize: with env.observe_task the policy reads numbers scaled by the ranges of "
        "training: leave it out"),
    Row("rollout.max_policy_lag rollout.mode",
        lambda c: c.rollout.mode == "sync" and c.rollout.max_policy_lag is not None,
        "rollout.max_policy_lag: expected rollout.mode async, got sync, whose policy does not lag: set "
        "rollout.mode=async, or leave rollout.max_policy_lag out"),
    Row("env_runners.ignore_env_runner_failures env_runners.recreate_failed_env_runners",
        lambda c: c.env_runners.ignore_env_runner_failures and c.env_runners.recreate_failed_env_runners,
        "env_runners: expected ignore_env_runner_failures (continue without a runner) or recreate_failed_env_runners "
        "(start another runner), got both: leave one out"),
    Row("env.on_nonfinite env_runners.num", lambda c: c.env_runners.num and c.env.on_nonfinite is not None,
        "env.on_nonfinite: expected environments of this process, got those of env_runners: leave one of them out"),
    Row("devices.actors env_runners.num", lambda c: c.env_runners.num and c.devices.actors is not None,
        "devices.actors: with env_runners this process does not act: leave it out, or env_runners.num 0"),
    Row(f"checkpoint.exact env_runners.num {' '.join(ASYNCHRONOUS)}", lambda c: (
            c.checkpoint.exact
            and (c.env_runners.num or not c.env.waits)
            and f"checkpoint.exact: {'env_runners' * bool(c.env_runners.num) or _UNEVEN} cannot repeat their steps: "
            "turn one of them off"
        )),
    Row("checkpoint.exact evaluation.parallel",
        lambda c: c.checkpoint.exact and c.evaluation.parallel and evaluates(c),
        "checkpoint.exact: a running parallel evaluation is not part of a checkpoint: turn checkpoint.exact or "
        "evaluation.parallel off"),
    Row("devices.platform devices.learners devices.actors devices.fake",
        lambda c: c.devices.platform == "auto" and (c.devices.learners or c.devices.actors or c.devices.fake),
        "devices.platform: expected cpu or null with devices.learners, actors or fake, which name devices of one "
        "platform, got auto: leave them out"),
    Row("devices.platform env_runners.num external",
        lambda c: c.devices.platform == "auto" and (c.env_runners.num or c.external is not None),
        "devices.platform: expected cpu or null with env_runners or external, whose speed is measured only in the run, "
        "got auto: leave it out"),
    Row("devices.learners devices.fake", _device_fault("learners")),
    Row("devices.actors devices.fake", _device_fault("actors")),
)
# fmt: on


def _no_end(cfg: Any) -> str:
    if Sizes(cfg).total_steps is not None:
        return ""
    key = Sizes(cfg).counts_by
    near = difflib.get_close_matches(key, cfg.stop, 1)
    fix = f"rename stop.{near[0]}" if near else f"set it, e.g. stop.{key}=1000000"
    return f"stop.{key} is missing: every run needs an end: {fix}"


# fmt: off
COMMANDS = (  # checks for commands only: from Python, the caller ends the run and may evaluate
    Row("stop", _no_end),
    Row("evaluation.record evaluation.every evaluation.interval", lambda c: (
            c.evaluation.record > 0
            and not evaluates(c)
            and f"evaluation.record: expected evaluations to record, got none: set evaluation.every={_tenth(c)}"
        )),
    Row("evaluation.elo_games evaluation.every evaluation.interval", lambda c: (
            c.evaluation.elo_games is not None
            and not evaluates(c)
            and f"evaluation.elo_games: expected evaluations, got none: set evaluation.every={_tenth(c)}"
        )),
)
# fmt: on


# ---------------------------------------------------------------- shares of devices that learn and collect


def _envs_fault(cfg: Any, devices: int) -> str:
    envs = cfg.env.num_envs
    near = f"env.num_envs {envs} is not divisible by {{}}: {{}}"
    if envs % devices:
        return near.format(f"{devices} devices", _near(envs, devices))
    pools = Sizes(cfg).num_pools(devices)
    if pools > 0 and envs % pools:
        return near.format(
            f"{pools} {'env_runners' if cfg.env_runners.num else 'devices that act'}", _near(envs, pools)
        )
    return ""


def _normalised_parts(cfg: Any) -> int:
    """Returns in how many parts a rollout's advantages are normalised; 0 if they are not."""
    how = getattr(cfg.algo, "normalize_advantage", False)
    return cfg.algo.num_minibatches if how == "minibatch" else int(how)


def _minibatch_fault(cfg: Any, devices: int) -> str:
    minibatches, own, length = Sizes(cfg).passes.num_minibatches or 1, Sizes(cfg).columns // devices, Sizes(cfg).length
    padded = cfg.rollout.batch_mode != "truncate_episodes"  # whole episodes are padded to a size that divides
    if not isinstance(minibatches, int) or cfg.env.num_envs % devices:
        return ""
    limit, whole = Sizes(cfg).sequence_length, traits(cfg.algo).whole_sequences
    if limit > 1 and length % limit == 0 and not whole:
        parts = length // limit
        fits = lambda n: own % (n // math.gcd(parts, n)) == 0
        if fits(minibatches) or (padded and cfg.network.max_seq_len is not None):
            return ""
        below = max(n for n in divisors(parts * own) if n <= minibatches and fits(n))
        return (
            f"algo.num_minibatches {minibatches} does not divide the {parts * own} sequences of {limit} steps, {parts} "
            f"of each of {counted(own, 'environment')} of a device: use {below}, or a smaller network.max_seq_len"
        )
    if whole and own % minibatches:
        below = max(n for n in divisors(own) if n <= minibatches)
        more = devices * (own + minibatches - own % minibatches)
        return (
            f"algo.num_minibatches {minibatches} does not divide the {counted(own, 'environment')} of a device, and "
            f"minibatches need whole sequences: use {below}, or env.num_envs {more}"
        )
    rows = own * length
    if whole or padded or rows % minibatches == 0:
        return ""
    below = max(n for n in divisors(rows) if n <= minibatches)
    above = min((n for n in divisors(rows) if n >= minibatches), default=0)
    lengths = _near(length, minibatches // math.gcd(minibatches, own))
    on = f" on each of {devices} devices" * (devices > 1)
    unit = "agent" if Sizes(cfg).columns > cfg.env.num_envs else "env"
    return (
        f"the batch of {counted(own, unit)} x {counted(length, 'step')} = {counted(rows, 'row')}{on} is not divisible "
        f"by algo.num_minibatches {minibatches}: {_either([below, above])} would do, or rollout.length {lengths}"
    )


def _collects_into_replay(cfg: Any) -> bool:
    return cfg.replay is not None and not datasets.alone(cfg)


def _train_every_fault(cfg: Any) -> str:
    envs = cfg.env.num_envs
    if not _collects_into_replay(cfg) or (every := cfg.replay.train_every) is None:
        return ""
    if every % envs:
        return f"replay.train_every {every} is not divisible by env.num_envs {envs}: {_near(every, envs)}"
    rows = envs * Sizes(cfg).length
    return (
        f"replay.train_every {every} and rollout.length {cfg.rollout.length} x {counted(envs, 'env')} = "
        + (f"{counted(rows, 'row')} disagree: leave one of them out, or rollout.length {every // envs}")
        if every != rows
        else ""
    )


def _updates_fault(cfg: Any, devices: int) -> str:
    if not _collects_into_replay(cfg) or _train_every_fault(cfg):
        return ""
    rows, ratio = Sizes(cfg).counted_columns * Sizes(cfg).length, cfg.replay.updates_per_step
    updates = ratio * rows
    if updates > 0 and abs(updates - round(updates)) <= 1e-6 * updates:
        return ""
    ratios = " or ".join(f"{n / rows:.6g}" for n in (math.floor(updates), math.ceil(updates)) if n > 0)
    # least multiple of the environments with a whole number of updates
    whole = math.lcm(cfg.env.num_envs, Fraction(ratio).limit_denominator(10_000).denominator)
    return (
        f"replay.updates_per_step {ratio:g} x {counted(rows, 'row')} per iteration = {updates:g} updates, not a whole "
        f"number above 0: replay.updates_per_step {ratios}, or replay.train_every {whole}"
    )


def _capacity_fault(cfg: Any, devices: int) -> str:
    if not _collects_into_replay(cfg) or _train_every_fault(cfg):
        return ""
    replay, sequences = cfg.replay, ""
    most_steps = max(replay.n_step) if isinstance(replay.n_step, tuple) else replay.n_step
    span = max(most_steps, replay.frame_stack or 1) + 1
    if cfg.network.recurrent:
        length = Sizes(cfg).sequence_length
        span = replay.burn_in + length + (replay.frame_stack or 1) + 1
        sequences = f" and sequences of {replay.burn_in} (replay.burn_in) + {length} steps (network.max_seq_len)"
    need, envs = Sizes(cfg).columns * (Sizes(cfg).length + span), counted(cfg.env.num_envs, "env")
    if replay.capacity >= need:
        return ""
    return f"replay.capacity {replay.capacity} is too small for {envs}{sequences}: at least {need}"


# fmt: off
SPLITS = (  # conditions (config, number of learning devices)
    Row("env.num_envs devices.learners devices.fake env_runners.num devices.actors", _envs_fault),
    Row("algo.normalize_advantage algo.num_minibatches env.num_envs rollout.length", lambda c, n: (
            Sizes(c).columns * Sizes(c).length == _normalised_parts(c)
            and c.env.num_envs % n == 0
            and c.rollout.batch_mode == "truncate_episodes"
        ),
        "algo.normalize_advantage: the normalised advantage of a single row is 0, so nothing would be learned: "
        "use a rollout.length of 2 or more, more env.num_envs, fewer algo.num_minibatches, or turn it off"),
    Row("algo.num_minibatches env.num_envs rollout.length devices.learners devices.fake network.max_seq_len",
        _minibatch_fault),
    Row("replay.train_every rollout.length env.num_envs", lambda c, n: _train_every_fault(c)),
    Row("replay.updates_per_step replay.train_every rollout.length env.num_envs", _updates_fault),
    Row("replay.batch_size devices.learners devices.fake", lambda c, n: (
            c.replay is not None
            and c.replay.batch_size % n
            and f"replay.batch_size {c.replay.batch_size} is not divisible by {n} devices: "
            f"{_near(c.replay.batch_size, n)}"
        )),
    Row("replay.n_step", lambda c, n: (
            c.replay is not None
            and isinstance(c.replay.n_step, tuple)
            and c.replay.n_step[0] > c.replay.n_step[1]
            and f"replay.n_step: expected [low, high] with low <= high, got {list(c.replay.n_step)}"
        )),
    Row("replay.capacity env.num_envs rollout.length replay.n_step network.max_seq_len", _capacity_fault),
    Row("replay.learning_starts stop.env_steps", lambda c, n: (
            _collects_into_replay(c)
            and "env_steps" in c.stop
            and c.replay.learning_starts >= c.stop["env_steps"]
            and f"replay.learning_starts {c.replay.learning_starts} is not below stop.env_steps {c.stop['env_steps']}, "
            "so nothing would be learned: lower it"
        )),
)
# fmt: on


def _near(number: int, unit: int) -> str:
    """Returns the two multiples of a unit around a number, as text."""
    return _either([number - number % unit, number + unit - number % unit])


def _either(numbers: Sequence[int]) -> str:
    return " or ".join(str(n) for n in numbers if n > 0)
