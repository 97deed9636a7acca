"""Policies of a run: their agents, acting and learning, and the work of the host between calls."""

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jrl import algos, spaces
from jrl.agents import fixed
from jrl.agents.fixed import Group
from jrl.config import RolloutConfig, RunConfig, Sizes, algo_name, discount_by_action, multi_agent, with_population
from jrl.errors import InputError
from jrl.learn.learner import Learner
from jrl.learn.program import LoopState, Program
from jrl.metrics.episodes import EpisodeState, clear_running
from jrl.rollout import unroll
from jrl.types import Algo, EnvSpec, PyTree, Rollout

if TYPE_CHECKING:
    from jrl.rollout import complete

# (config and spec of one policy's agents alone) -> the policy's algorithm
MakeAlgo = Callable[[RunConfig, EnvSpec], Algo]


class Policies(abc.ABC):
    """Policies of a run. Their State is a dict by policy, their ActorState a dict by group.

    Attributes:
      cfg: config of the run.
      names: names of the policies; () with a single agent.
      trained: names of the policies that learn.
      several: whether states are dicts by policy.
      watches_games: whether learning needs the environments' own rewards and ends (`jrl.rollout.unroll.RAW_STEPS`).
      decides_by_row: whether a result row changes the state of the next call, so that rows cover all calls before it.
      in_checkpoint: whether the policies are defined by a checkpoint, not by the config.
    """

    several = True
    watches_games = False
    decides_by_row = False
    in_checkpoint = False

    def __init__(self, cfg: RunConfig, spec: EnvSpec | None):
        self.cfg, self._spec = cfg, spec
        self._agents = multi_agent.followers(cfg.multi_agent)
        self.names = tuple(self._agents)
        self.trained = tuple(name for name in self.names if multi_agent.is_trained(cfg.multi_agent, name))

    # ------------------------------------------------------------ agents, columns and groups

    @property
    def spec(self) -> EnvSpec:
        """Returns the spec of the environments."""
        assert self._spec is not None
        return self._spec

    @property
    def policy_spec(self) -> EnvSpec:
        """Returns the spec as policies see it."""
        return self.spec

    def policy_obs(self, obs: PyTree) -> PyTree:
        """Returns a rollout's observations as policies see them."""
        return obs

    @property
    def the_one(self) -> str | None:
        """Returns the only policy; None: there are none or several."""
        return multi_agent.the_one(self.cfg.multi_agent)

    def of(self, policy: str) -> tuple[RunConfig, EnvSpec]:
        """Returns config and spec of one policy's agents alone."""
        return multi_agent.policy_config(self.cfg, policy), _spec_of(self.policy_spec, self._agents[policy])

    @property
    def similar(self) -> list[list[str]]:
        """Returns the policy names of each group, whose policies differ only in weights and floats of `algo`."""
        found: list[tuple[Any, list[str]]] = []
        for name in self.names:
            like = self._likeness(name)
            names = next((names for other, names in found if other == like), None)
            if names is None:
                found.append((like, names := []))
            names.append(name)
        return [names for _, names in found]

    def _likeness(self, name: str) -> Any:
        agents = self._agents[name]
        kind = next(one.agents for one in spaces.by_kind(self.policy_spec) if agents[0] in one.agents)
        own = without_floats(multi_agent.policy_config(self.cfg, name))
        return own, name in self.trained, len(agents), kind

    @functools.cached_property
    def groups(self) -> tuple[Group, ...]:
        """Returns the groups of similar policies, without algorithms."""
        found = []
        for names in self.similar:
            configs = [multi_agent.policy_config(self.cfg, name) for name in names]
            numbers = [[self.spec.agents.index(agent) for agent in self._agents[name]] for name in names]
            spec = _spec_of(self.policy_spec, self._agents[names[0]])
            floats = differing([cfg.algo for cfg in configs])
            group = Group(tuple(names), np.array(numbers), kinds=self.spec.kinds, cfg=configs[0], spec=spec)
            found.append(group._replace(floats=floats) if floats else group)
        return tuple(found)

    def learns(self, group: Group) -> bool:
        """Returns whether a group learns."""
        return group.names[0] in self.trained

    def by_name(self, by_group: PyTree) -> dict[str, PyTree]:
        """Returns a State or ActorState by group as a dict by policy."""
        return fixed.by_policy_name(self.groups, by_group)

    def states(self, kept: PyTree) -> dict[str, PyTree]:
        """Returns a State from `Learner.keep` as a dict by policy."""
        return kept

    def join(self, states: Mapping[str, PyTree]) -> PyTree:
        """Returns the inverse of `states`."""
        return dict(states)

    # ------------------------------------------------------------ acting and learning

    def bind(self, make: MakeAlgo) -> tuple[Group, ...]:
        """Returns the groups with their algorithms."""
        return tuple(_bound(group, make) for group in self.groups)

    @abc.abstractmethod
    def acting(self, groups: Sequence[Group]) -> Algo:
        """Returns the Algo that acts with all policies; `groups` are from `bound`."""

    @abc.abstractmethod
    def learning(self, groups: Sequence[Group], *, axis_name: str | None = None) -> Learner:
        """Returns the Learner of all policies; `groups` that learn have their learners."""

    # ------------------------------------------------------------ names for reports, callbacks, data and evaluations

    @property
    def reported(self) -> Mapping[str, Sequence[str]]:
        """Returns policy -> its agents; {}: the agents change from game to game."""
        return self._agents

    @property
    def column_policies(self) -> tuple[str, ...]:
        """Returns the policy of each column of a game or block of games."""
        owned = [zip(group.names, group.agents.tolist(), strict=True) for group in self.groups]
        pairs = sorted((column, name) for group in owned for name, columns in group for column in columns)
        return tuple(name for _, name in pairs)

    @property
    def labels(self) -> tuple[str, ...]:
        """Returns the policy label of each column in recorded data."""
        return self.column_policies

    @property
    def columns(self) -> "complete.Agents | None":
        """Returns the agents, policies and extras of a rollout's columns; None: a single agent."""
        if not self.spec.agents:
            return None
        from jrl.rollout import complete

        return complete.Agents(tuple(map(self.names.index, self.column_policies)), self.spec.kinds, self._extras())

    def _extras(self) -> dict[str, tuple[int, ...]]:
        return {group.label: tuple(group.agents.reshape(-1).tolist()) for group in self.groups}

    @property
    def game_options(self) -> dict[str, Any]:
        """Returns the options of `Stitch` for several agents; {} with a single agent."""
        if not self.spec.agents:
            return {}
        return {"kinds": self.spec.kinds, "agents": self.spec.agents, "policies": self.column_policies}

    def whole_games(self, games: int) -> int:
        """Returns `games`, rounded up until each policy has each seat equally often."""
        return games

    @property
    def rewards_of(self) -> Callable[[int], tuple[np.ndarray, int]] | None:
        """Returns the columns whose rewards an evaluation reports, see `envs.AgentOptions`; None: all columns."""
        return None

    def returns(self, played: Any) -> dict[str, float]:
        """Returns `agent/NAME/return` and `policy/NAME/return` of an evaluation; {} with a single agent.

        An agent's return is the mean over games of its sum of rewards. A policy's return is the mean over its agents.

        Args:
          played: a `jrl.play.tally.Evaluation`; None: all returns are NaN.
        """
        agents = (self.cfg.multi_agent and self.cfg.multi_agent.agents) or ()
        found = None if played is None else played.agents
        if found is None or found.shape[1] != len(agents):
            found = np.zeros((0, len(agents)), np.float32)
        row = {f"agent/{agent}/return": mean(found[:, i]) for i, agent in enumerate(agents)}
        return row | {f"policy/{name}/return": mean(found[rows]) for name, rows in self._rows_of(played, agents)}

    def _rows_of(self, played: Any, agents: Sequence[str]) -> list[tuple[str, Any]]:
        """Returns an index of each policy into the returns [episodes, A] of an evaluation."""
        return [(name, (slice(None), [agents.index(agent) for agent in own])) for name, own in self._agents.items()]

    # ------------------------------------------------------------ on the host, between calls

    def check(self) -> None:  # noqa: B027  # most policies need no such function
        """Raises InputError: the policy mapping returns an unknown policy."""

    def prepare(self, program: Program, state: LoopState) -> LoopState:
        """Returns the state for the next call."""
        return state

    def on_row(
        self, program: Program, state: LoopState, row: dict[str, Any], count: int, directory: Path | None
    ) -> LoopState:
        """Changes the policies' metrics of new row number `count`; returns the state, which the row may change.

        `state` is the state after the row's last call. If another state is returned, `state` must not be used again.
        """
        return state

    def draw(self, state: LoopState, directory: Path, title: str) -> Path | None:
        """Draws a figure of the policies; returns the file, or None."""
        return None

    def continued(
        self, fresh: LoopState, kept: LoopState, before: "Policies", given: Mapping[str, PyTree], devices: int
    ) -> LoopState:
        """Returns the state after a change of policies: policies keep State and replay by name.

        Args:
          fresh: initial state of this run, from `Program.keep`.
          kept: state of the previous run, from `Program.keep`.
          before: policies of the previous run.
          given: policy -> initial State.
          devices: number of learner devices of both runs.
        Raises:
          InputError: a given State has other arrays than the policy.
        """
        old, new = before.states(kept.learner), self.states(fresh.learner)
        for name, state in given.items():
            if shapes(state) != shapes(new[name]):
                raise InputError(f"add_policy: state: expected arrays as those of {name}, got others: leave it out")
        states = {name: given.get(name, old.get(name, new[name])) for name in self.names}
        replays, wanted = before._replays(kept.replay, devices), self._replays(fresh.replay, devices)
        fits = lambda name: name in replays and shapes(replays[name]) == shapes(wanted[name])
        source = fresh.source
        columns, like = (x if isinstance(x, EpisodeState) else getattr(x, "columns", ()) for x in (kept.source, source))
        if isinstance(columns, EpisodeState) and shapes(columns) == shapes(like):
            latest = jax.device_get(clear_running(columns))
            source = latest if isinstance(source, EpisodeState) else source.replace(columns=latest)
        return LoopState(
            learner=self.join({**self._beside(new, old, before), **states}),
            replay=self._join_replays(fresh.replay, {n: (replays if fits(n) else wanted)[n] for n in wanted}),
            source=source,
        )

    def _beside(self, new: Mapping[str, PyTree], old: Mapping[str, PyTree], before: "Policies") -> dict[str, PyTree]:
        """Returns the items of a State that are not policies."""
        return {}

    def _replays(self, replay: PyTree, devices: int) -> dict[str, PyTree]:
        """Returns policy -> replay; leaves are [D, n], flat for each of D devices."""
        part = lambda i, num: lambda x: x.reshape(devices, num, -1)[:, i]
        by_group = self._by_group(replay)
        return {
            name: jax.tree.map(part(i, len(group.names)), by_group[group.label])
            for group in self.groups
            for i, name in enumerate(group.names)
            if group.label in by_group
        }

    def _join_replays(self, like: PyTree, replays: Mapping[str, PyTree]) -> PyTree:
        """Returns the inverse of `_replays`, in the shapes of `like`."""
        join = lambda x, *parts: np.stack(parts, 1).reshape(x.shape)
        parts = lambda group: (replays[name] for name in group.names)
        by_group = self._by_group(like)
        mine = [group for group in self.groups if group.label in by_group]
        found = {group.label: jax.tree.map(join, by_group[group.label], *parts(group)) for group in mine}
        return found if self.several else found[self.groups[0].label]

    def _by_group(self, replay: PyTree) -> Mapping[str, PyTree]:
        return replay if self.several else {self.groups[0].label: replay}


class Single(Policies):
    """A single policy, which learns and controls all agents; its State is the algorithm's State."""

    several = False

    @functools.cached_property
    def groups(self) -> tuple[Group, ...]:
        cfg = with_population(discount_by_action(self.cfg))
        if self.names:
            cfg = multi_agent.policy_config(self.cfg, self.names[0])
        agents = np.arange(max(1, len(self.spec.agents)))[None]
        return (Group((self.the_one or "",), agents, kinds=self.spec.kinds, cfg=cfg, spec=self.spec),)

    def learns(self, group: Group) -> bool:
        return True

    def by_name(self, by_group: PyTree) -> dict[str, PyTree]:
        return self.states(by_group)

    def states(self, kept: PyTree) -> dict[str, PyTree]:
        return {self.the_one or "": kept}

    def join(self, states: Mapping[str, PyTree]) -> PyTree:
        return states[self.the_one or ""]

    def acting(self, groups: Sequence[Group]) -> Algo:
        return groups[0].algo

    def learning(self, groups: Sequence[Group], *, axis_name: str | None = None) -> Learner:
        return fixed.learner_of(groups[0])

    def _extras(self) -> dict[str, tuple[int, ...]]:
        return {}


class Fixed(Policies):
    """Several policies, each with the same agents in all games; or a single policy that does not learn."""

    def acting(self, groups: Sequence[Group]) -> Algo:
        return fixed.acting(groups, len(self.spec.agents))

    def learning(self, groups: Sequence[Group], *, axis_name: str | None = None) -> Learner:
        return fixed.learning(groups, len(self.spec.agents), lockstep=multi_agent.in_lockstep(self.cfg.multi_agent))


def _bound(group: Group, make: MakeAlgo) -> Group:
    own = group._replace(algo=make(group.cfg, group.spec))
    if not group.floats:
        return own

    def with_values(values: Mapping[int, Any]) -> Group:
        cfg = dataclasses.replace(group.cfg, algo=with_floats(group.cfg.algo, values))
        return group._replace(algo=make(cfg, group.spec), cfg=cfg, floats=())

    return own._replace(with_values=with_values)


def _spec_of(spec: EnvSpec, agents: tuple[str, ...]) -> EnvSpec:
    """Returns the spec of some agents of one kind."""
    kind = next(one for one in spaces.by_kind(spec) if agents[0] in one.agents)
    return kind._replace(num_envs=spec.games * len(agents), agents=agents)


def without_floats(cfg: RunConfig) -> tuple[Any, ...]:
    """Returns the config without its agents and the floats of its algorithm, for comparison.

    The floats of a user's algorithm are kept, since its Python code may read them.
    """
    rest = dataclasses.replace(cfg, multi_agent=None)
    if algos.is_own(algo_name(cfg)):
        return (rest,)
    return dataclasses.replace(rest, algo=None), type(cfg.algo), jax.tree.structure(cfg.algo)


def differing(configs: Sequence[Any]) -> dict[int, np.ndarray]:
    """Returns the floats in which Configs of equal structure differ: index of the leaf -> [P] f32.

    Equal floats stay Python numbers, which XLA can fold.
    """
    leaves = zip(*map(jax.tree.leaves, configs), strict=True)
    return {i: np.asarray(values, np.float32) for i, values in enumerate(leaves) if len(set(values)) > 1}


def with_floats(config: PyTree, values: Mapping[int, Any]) -> PyTree:
    """Returns a Config or a tree of Configs with other floats, by index of the leaf -> value, which may be traced."""
    leaves, structure = jax.tree.flatten(config)
    return jax.tree.unflatten(structure, [values.get(i, x) for i, x in enumerate(leaves)])


def mean(x: np.ndarray) -> float:
    """Returns the mean; NaN for an empty array."""
    return float(x.mean()) if x.size else float("nan")


def shapes(tree: PyTree) -> PyTree:
    """Returns shapes and dtypes of a tree's arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def learned(rollout: RolloutConfig, spec: EnvSpec) -> EnvSpec:
    """Returns the spec as learners see it: without agents if `count_steps_by` is agent_steps."""
    return spec._replace(agents=()) if rollout.count_steps_by == "agent_steps" else spec


def rollout_like(sizes: Sizes, spec: EnvSpec, algo: Algo, **shape: Any) -> Rollout:
    """Returns shapes and dtypes of rollouts of a learner; `shape` as `unroll.rollout_like`."""
    cfg = sizes.cfg
    like = unroll.rollout_like(learned(cfg.rollout, spec), algo, **shape)
    if spec.agents and unroll.RAW_STEPS in like.extras and cfg.rollout.count_steps_by == "agent_steps":
        recorded: Any = like.extras[unroll.RAW_STEPS]
        like = dataclasses.replace(like, extras={**like.extras, unroll.RAW_STEPS: {**recorded, "over": like.mask}})
    side_by_side = cfg.rollout.batch_mode == "truncate_episodes" and cfg.external is None
    if side_by_side:
        return like
    from jrl.rollout import complete

    return complete.mark_counted_steps_like(like)
