"""The `external` section: episodes that clients play, and what does not go with them."""

from collections.abc import Iterator
from typing import Annotated, Any

from annotated_types import Interval

from jrl.fields.bounds import Amount, Count, Few, NonNegative, Positive, Seconds
from jrl.fields.data import Fixed, Fresh, learns_from, traits
from jrl.fields.validation import section

_LAG = 4  # updates, of algorithms that learn from rollouts as they come, and do not correct for their age


@section
class ExternalConfig:
    """Episodes that clients play over HTTP (python -m jrl.serve), at most env.num_envs of them at a time."""

    # what clients observe and choose: {box: [4]}, {box: [2], low: -1, high: 1}, {box: [84, 84, 4], dtype: uint8},
    # {discrete: 2}, {multi_discrete: [3, 2]}, {multi_binary: [4]}, {dict: {name: ...}}, {tuple: [...]}; null: those of
    # `spaces` or env.id
    observation: dict[str, Any] | None = None
    action: dict[str, Any] | None = None
    # names of the agents, where an episode has several: then the spaces above are those of all, or of each by its name;
    # null: one agent, or those of `spaces` or env.id
    agents: tuple[str, ...] | None = None
    spaces: str | None = None  # run directory or checkpoint with these spaces, of which nothing else is taken
    host: str = "127.0.0.1"  # address to listen at; one that others reach needs a token
    port: Annotated[int, Interval(ge=0, le=65_535)] = 9900  # 0: any that is free, which the command tells
    token_file: str | None = None  # its first line is what clients have to show; null: nothing
    certificate: str | None = None  # file of a TLS certificate, PEM; null: without TLS
    private_key: str | None = None  # file of its key; null: in the file of the certificate
    origins: tuple[str, ...] = ()  # whose pages may play, in browsers: http://HOST:PORT each; *: all, with a token
    timeout_s: Seconds = 60.0  # without a word from its client until an episode has failed, and a connection is closed
    max_wait_ms: Annotated[float, Interval(ge=0, le=1000)] = 1.0  # that a request waits for others to be answered with
    # updates between the weights that chose an action and the update that learns from it; older steps are dropped.
    # null: 4 for ppo, and any number with replay and for impala and appo, which correct for it
    max_lag: Amount | None = None
    max_body_mb: Positive = 16.0  # of a request
    max_clients: Count = 256  # connections at a time
    max_rate: NonNegative = 0.0  # requests per second of a connection; 0: any number
    max_batch: Few = 256  # episodes in one request


def max_lag(cfg: Any) -> int | None:
    """Returns the updates that weights may be behind when their steps are learned from; None: any number."""
    given, of_any_age = cfg.external.max_lag, traits(cfg.algo).corrects
    return given if given is not None or of_any_age or learns_from(cfg.algo) is not Fresh else _LAG


def faults(cfg: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields what does not go with clients that play: the keys that were read, and the message."""
    given = cfg.external
    if given is None:
        return
    name = type(cfg.algo).__module__.rpartition(".")[2]
    if traits(cfg.algo).uncorrected:
        yield (
            ("external", "algo.name"),
            f"external: {name} takes each step for its own policy's, and clients go on while weights change: use ppo, "
            "appo or impala, or one that learns from replay",
        )
    if learns_from(type(cfg.algo)) is Fixed:
        message = f"external: {name} learns from a data set alone: use an algorithm that collects"
        yield ("external", "algo.name"), message
    own = [key for key in ("observation", "action") if getattr(given, key) is not None]
    if given.spaces is not None and own:
        message = f"external.spaces names a run that has spaces: leave out external.{own[0]}, or external.spaces"
        yield ("external.spaces", f"external.{own[0]}"), message
    elif len(own) == 1:
        keys = ("external.observation", "external.action")
        yield keys, "external: observation and action are given together: give the other, or name env.id"
    told = given.spaces is not None or bool(own)
    if not told and not cfg.env.id:
        yield (
            ("external.observation", "external.action", "env.id"),
            "external.observation is missing: say what clients observe and choose, e.g. external.observation="
            "{box: [4]} and external.action={discrete: 2}, or name an environment with these spaces as env.id, or a "
            "run as external.spaces",
        )
    if told and not cfg.env.id and (cfg.evaluation.every or cfg.evaluation.interval):
        yield (
            ("env.id", "evaluation.every", "evaluation.interval"),
            "evaluation: without env.id there is no environment to play in: leave evaluation.every and "
            "evaluation.interval out",
        )
    if given.agents is not None:
        yield from _agent_faults(cfg)
    if given.private_key is not None and given.certificate is None:
        keys = ("external.private_key", "external.certificate")
        yield keys, "external.private_key: there is no certificate that it belongs to: set external.certificate"
    yield from several_faults(cfg)
    yield from _refused(cfg)


def _agent_faults(cfg: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    given = cfg.external
    if given.observation is None:
        yield (
            ("external.agents", "external.observation"),
            (
                "external.agents: say what they see and do in external.observation and external.action, or leave it "
                "out: env.id and external.spaces know their agents"
            ),
        )
    if len(set(given.agents)) < len(given.agents) or len(given.agents) < 2:
        yield (
            ("external.agents",),
            (
                f"external.agents: expected two different names or more, got {list(given.agents)}: leave it out where "
                "an episode has one agent"
            ),
        )
    if cfg.evaluation.every or cfg.evaluation.interval:
        yield (
            ("external.agents", "evaluation.every", "evaluation.interval"),
            "evaluation: external.agents names agents that env.id does not have: leave evaluation.every and "
            "evaluation.interval out, or take the agents of env.id, without external.agents, observation and action",
        )
    several = cfg.multi_agent
    if several is not None and several.agents is not None and several.agents != given.agents:
        yield (
            ("external.agents", "multi_agent.agents"),
            (f"multi_agent.agents: external.agents has {', '.join(given.agents)}: leave multi_agent.agents out"),
        )


def several_faults(cfg: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields what does not go with several agents that clients play: their rows do not stand side by side."""
    if cfg.external is None or (cfg.multi_agent is None and cfg.external.agents is None):
        return
    given = cfg.multi_agent
    own = lambda name: None if given is None else getattr(given, name)
    rows = "clients play each agent by its own turns, so that rows of a game's agents do not stand side by side"
    sends = "clients send what the policy sees"
    for key, is_set, why in (
        ("multi_agent.self_play", own("self_play") is not None, rows),
        ("multi_agent.group", own("group") is not None, rows),
        ("multi_agent.replay_mode", own("replay_mode") == "lockstep", rows),
        ("multi_agent.state", bool(own("state")), sends),
        ("multi_agent.observation_fn", own("observation_fn") is not None, sends),
        ("multi_agent.agent_id", bool(own("agent_id")), sends),
    ):
        if is_set:
            yield ("external", key), f"{key}: with external {why}: leave it out"


def _refused(cfg: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    network, rollout = cfg.network, cfg.rollout
    plays = "clients play the episodes"
    for key, is_set, why in (
        ("env_runners.num", cfg.env_runners.num, plays),
        ("rollout.mode", rollout.mode != "sync", "clients are answered while it learns in any case"),
        ("rollout.batch_mode", rollout.batch_mode != "truncate_episodes", "the length of episodes is not known"),
        ("rollout.collector", rollout.collector != "auto", plays),
        ("rollout.fake", rollout.fake, plays),
        *cfg.env.stepping(),
        ("network.use_prev_action", network.use_prev_action, "clients send what the policy sees"),
        ("network.use_prev_reward", network.use_prev_reward, "clients send what the policy sees"),
        ("checkpoint.exact", cfg.checkpoint.exact, "clients never do the same twice"),
        ("custom.env_task", cfg.custom.env_task, "there are no environments here"),
        ("devices.actors", cfg.devices.actors is not None, "actions are chosen on the device that learns"),
    ):
        if is_set:
            yield ("external", key), f"{key}: with external {why}: leave it out"
