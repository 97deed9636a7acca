"""Single steps of a run beside its iterations: a rollout, an update on what is given, a gradient, a step by one.

They are those of the run: the environments are where training left them, an update is `Algo.update` with the run's
optimizer, guard and devices. Each compiles its program when it is first asked for; a run that is never asked has none.
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrl.agents import Policies
from jrl.agents.policies import rollout_like
from jrl.algos import gradients
from jrl.config import algo_name
from jrl.errors import InputError
from jrl.fields.data import Fresh
from jrl.learn import learner, parallel
from jrl.learn.fused import Fused
from jrl.learn.offline import Offline
from jrl.learn.program import NO_STEPS, Clock, Role, own_replay, role_key
from jrl.run import build
from jrl.run.policies import BaseSession
from jrl.types import COUNTS_STEP, NOT_FINITE, POLICY_ID, Algo, Batch, Episodes, Key, PyTree, Rollout, SequenceBatch

POLICY = "default_policy"  # the id of the one policy, whatever its name
_FIRST = 2**31  # number of the first call by hand, in keys: the calls of an iteration count from 0


class Known(NamedTuple):
    """The policies of a run by the ids that RLlib's users have for them."""

    ids: tuple[str, ...]
    trained: tuple[str, ...]  # those that learn
    policies: Policies

    def named(self, policy_id: str) -> str:
        """Returns the id of a policy. Raises KeyError: there is none of that id."""
        if policy_id in self.ids:
            return policy_id
        if policy_id == POLICY and len(self.ids) == 1:
            return self.ids[0]
        raise KeyError(f"policy_id: expected {' or '.join(self.ids)}, got {policy_id!r}: get_policy(policy_id)")

    def split(self, actor: PyTree) -> dict[str, PyTree]:
        """Splits what acts for all policies by their ids."""
        return self.policies.by_name(actor) if self.policies.several else {self.ids[0]: actor}


def known(session: BaseSession) -> Known:
    """Lists the policies of a run; the one of a run with one agent is `default_policy`."""
    policies = session.run.policies
    return Known(policies.names or (POLICY,), policies.trained or (() if policies.names else (POLICY,)), policies)


class Learns(abc.ABC):
    """Weights and updates of a run by RLlib's names: what its Algorithm, its workers and its policy share."""

    @abc.abstractmethod
    def _learns(self, what: str) -> BaseSession:
        """Returns the run. Raises InputError where there is none for `what`."""

    def set_weights(self, weights: Mapping[str, Any]) -> None:
        """Takes over the result of `get_weights`, of some policies or all. Raises ValueError: wrong names, shapes."""
        set_by_policy(self._learns("set_weights"), "set_weights", weights)

    def learn_on_batch(self, samples: Rollout | Batch | SequenceBatch) -> dict[str, float]:
        """Makes one update of the run on `samples`, beside the iterations of `train`.

        Args:
          samples: a rollout, as `workers.local_worker().sample()` gives one: all epochs on it, or with replay it is
            added, and then learned from if there is enough. A batch, as `sample_replay` gives one: a gradient step.
        Returns:
          The update's metrics.
        Raises:
          InputError: the algorithm does not learn from such a thing, or not of that size.
          FloatingPointError: the update was not finite, and was not made.
        """
        return self._learns("learn_on_batch").by_hand.learn(samples)

    def compute_gradients(self, samples: Rollout | Batch | SequenceBatch) -> tuple[PyTree, dict[str, float]]:
        """Returns the gradient of the algorithm's loss at the present parameters; changes nothing.

        What an update does in several steps is taken at the same parameters: PPO's minibatches give the gradient over
        the whole rollout, SAC's actor that by the critics as they are.

        Args:
          samples: on-policy a rollout, with replay a batch, as `learn_on_batch`.
        Returns:
          Gradients as the parameters, before clipping, in numpy; the metrics of the loss.
        Raises:
          InputError: the algorithm does not learn from such a thing, or has an optimizer of its own.
        """
        return self._learns("compute_gradients").by_hand.gradients(samples)

    def apply_gradients(self, grads: PyTree) -> None:
        """Makes one step of the run's optimizer, with its clipping and step size, by gradients of `compute_gradients`.
        Target networks move as after an update. Raises ValueError: other shapes, or not finite.
        """
        self._learns("apply_gradients").by_hand.apply(grads)


def set_by_policy(session: BaseSession, what: str, weights: Mapping[str, Any]) -> None:
    """Gives each policy the fields of its State under its id."""
    there = known(session)
    if not weights or set(weights) - {*there.ids, *([POLICY] if len(there.ids) == 1 else [])}:
        wanted = ", ".join(f"'{name}': ..." for name in there.ids)
        raise ValueError(f"{what}: expected {{{wanted}}}, got {', '.join(map(str, weights)) or 'nothing'}")
    for policy_id, given in weights.items():
        session.set_weights(given, there.named(policy_id) if session.policies else None)


class ByHand:
    """The single steps of one run."""

    def __init__(self, session: BaseSession):
        self._session = session
        self._calls = _FIRST
        self._programs: dict[str, Callable[..., Any]] = {}

    def forget_programs(self) -> None:
        """Drops the compiled programs of a run that was made anew."""
        self._programs.clear()

    def _program(self, name: str, make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        if name not in self._programs:
            self._programs[name] = make()
        return self._programs[name]

    def _call(self) -> int:
        self._calls += 1
        return self._calls

    def key(self, role: Role) -> Key:
        """Returns another key at each call."""
        session = self._session
        return jax.random.fold_in(role_key(session.config.run.seed, role, session.iteration), self._call())

    # ------------------------------------------------------------ sampling

    def sample(self) -> tuple[Rollout, Episodes]:
        """Collects the next rollout [T, B] of all environments, on the host; training goes on behind it.

        Its steps count once it is learned from.

        Raises:
          InputError: EnvPool steps the environments inside the program that learns; or there are none.
        """
        session, program = self._session, self._session.run.program
        if isinstance(program, Offline):
            raise InputError("sample: the run learns from data.input alone: sample_replay() draws a batch of it")
        if isinstance(program, Fused) and not program.unroll.pure:
            raise InputError(
                f"sample: {session.config.env.id} is stepped by EnvPool inside the program that learns: use "
                "rollout.collector host"
            )
        number = session.config.run.seed, session.iteration, self._call()
        before = session.run.policies.ahead(program, session.state)
        state, *found = program.collect(before, *number)
        session.replace_state(program.discontinue(state))
        rollout, report = jax.device_get(found)
        return rollout, report

    def sample_replay(self) -> Batch | SequenceBatch:
        """Returns a batch as the next gradient step would draw one of replay or data, on the host.

        Raises:
          InputError: there is no replay, or nothing to sample in it yet.
        """
        session = self._session
        self._alone("sample_replay")
        learn, state = session.run.learn, session.state
        if isinstance(session.run.program, Offline):
            return jax.device_get(session.run.program.sampled(state, self.key(Role.UPDATE)))
        if learn.sample is None:
            raise InputError(f"sample_replay: {algo_name(session.config)} learns without replay: sample() is a rollout")

        def body(replay, key):
            assert learn.sample is not None and learn.can_sample is not None
            own = own_replay(replay, learn)
            return learn.can_sample(own)[None], learn.sample(own, key)

        same, per_device = parallel.REPLICATED, parallel.PER_DEVICE
        mapped = lambda: parallel.pmap(body, session.run.plan.mesh, (per_device, same), per_device)
        draw = self._program("replay", mapped)
        ready, batch = jax.device_get(draw(state.replay, self.key(Role.UPDATE)))
        if not ready.all():
            raise InputError("sample_replay: replay is empty: train(), or learn_on_batch(rollout), fills it")
        return batch

    # ------------------------------------------------------------ learning

    def learn(self, batch: Rollout | Batch | SequenceBatch) -> dict[str, float]:
        """Makes one update of the run on a batch or rollout: see `Learns.learn_on_batch`."""
        session = self._session
        self._check("learn_on_batch", batch)
        if isinstance(batch, Rollout):
            batch = dataclasses.replace(batch, contiguous=np.zeros_like(batch.contiguous))
            steps = counted(batch, session.run.policies)
            state, metrics = self._learn_rollout(batch)
        else:
            self._alone("learn_on_batch of a batch")
            steps = NO_STEPS
            state, metrics = self._learn_batch(batch)
        session.replace_state(state, steps)
        found = {name: float(x) for name, x in jax.device_get(metrics).items()}
        if found.get(NOT_FINITE):
            raise FloatingPointError("learn_on_batch: the update was not finite, and was not made")
        return found

    def _learn_rollout(self, rollout: Rollout):
        session = self._session
        program = session.run.program
        placed = parallel.shard(rollout, session.run.plan.mesh, parallel.ROLLOUT)
        number = session.config.run.seed, session.iteration, self._call()
        return program.learn(program.discontinue(session.state), placed, *number)

    def _learn_batch(self, batch: Batch | SequenceBatch):
        run, state, same = self._session.run, self._session.state, parallel.REPLICATED

        def body(learned, batch, key):
            assert run.learn.update is not None
            learned, aux = run.learn.update(learned, batch, key)
            return learned, aux.metrics

        make = lambda: parallel.pmap(body, run.plan.mesh, (same, parallel.PER_DEVICE, same), (same, same))
        placed = parallel.shard(batch, run.plan.mesh)
        learned, metrics = self._program("update", make)(state.learner, placed, self.key(Role.UPDATE))
        return dataclasses.replace(state, learner=learned), metrics

    # ------------------------------------------------------------ gradients

    def gradients(self, batch: Rollout | Batch | SequenceBatch) -> tuple[PyTree, dict[str, float]]:
        """Returns the gradient of the algorithm's loss, and its metrics: see `Learns.compute_gradients`."""
        session, run = self._session, self._session.run
        self._alone("compute_gradients")
        self._check("compute_gradients", batch)
        rollout = isinstance(batch, Rollout)

        def make() -> Callable[..., Any]:
            algo = self._remade(gradients.taken)
            single = learner.on_policy(algo._replace(data=Fresh()))
            whole = learner.transform_rollouts(single, build.transforms(session.config.custom, session.callback_list))

            def body(state, batch, key):
                state = dataclasses.replace(state, opt_state=algo.init(jax.random.key(0)).opt_state)
                if rollout:
                    state, _, metrics = whole.step(state, (), batch, key)
                else:
                    state, aux = algo.update(state, batch, key)
                    metrics = aux.metrics
                return jax.tree.map(lambda taken: taken.mean(), state.opt_state, is_leaf=gradients.is_node), metrics

            same = parallel.REPLICATED
            specs = (same, parallel.ROLLOUT if rollout else parallel.PER_DEVICE, same), (same, same)
            return parallel.pmap(body, run.plan.mesh, *specs)

        placed = parallel.shard(batch, run.plan.mesh, parallel.ROLLOUT if rollout else parallel.PER_DEVICE)
        state = run.program.keep(session.state).learner
        found, metrics = jax.device_get(self._program("gradients", make)(state, placed, self.key(Role.UPDATE)))
        return found, {name: float(x) for name, x in metrics.items()}

    def apply(self, given: PyTree) -> None:
        """Makes one step of the run's optimizer by gradients of `gradients`: see `Learns.apply_gradients`."""
        session, run = self._session, self._session.run
        self._alone("apply_gradients")
        state = run.program.keep(session.state).learner
        shapes = lambda tree: jax.tree.map(np.shape, tree)
        if shapes(given) != shapes(state.params):
            raise ValueError(f"apply_gradients: expected the shapes {shapes(state.params)}, got {shapes(given)}")
        if not all(np.isfinite(x).all() for x in jax.tree.leaves(given)):
            raise ValueError("apply_gradients: they are not finite: no step was made")

        def make() -> Callable[..., Any]:
            algo = self._remade(gradients.given)

            def body(state, given, key):
                like = jax.eval_shape(algo.init, key).opt_state
                put = lambda _, own, gradient: gradients.Given(own, gradient, jnp.zeros((), bool))
                opt_state = jax.tree.map(put, like, state.opt_state, given, is_leaf=gradients.is_node)
                zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self._like(algo, key))
                after = algo.update(dataclasses.replace(state, opt_state=opt_state), zeros, key)[0]
                own = jax.tree.map(lambda node: node.state, after.opt_state, is_leaf=gradients.is_node)
                moved = {f.name: getattr(after, f.name) for f in dataclasses.fields(after) if _moves(f.name)}
                return dataclasses.replace(state, **{**moved, "opt_state": own})

            same = parallel.REPLICATED
            return parallel.pmap(body, run.plan.mesh, (same, same, same), same)

        placed = parallel.replicate(given, run.plan.mesh)
        after = self._program("apply", make)(state, placed, self.key(Role.UPDATE))
        session.replace_state(run.program.assign(session.state, after))

    def _remade(self, standing_in: Callable[[], Any]) -> Algo:
        session = self._session
        with standing_in():
            algo = build.algorithm(
                session.config, session.run.spec, axis_name=parallel.AXIS, callback_list=session.callback_list
            )
        found = jax.eval_shape(algo.init, jax.random.key(0))
        nodes = jax.tree.leaves(getattr(found, "opt_state", ()), is_leaf=gradients.is_node)
        if not nodes or not all(map(gradients.is_node, nodes)):
            raise InputError(
                f"gradients: {algo_name(session.config)} has an optimizer of its own: learn_on_batch makes an update, "
                "and steps of jrl.algos.agent.descend lend theirs"
            )
        return algo

    def _like(self, algo: Algo, key: Key) -> PyTree:
        run = self._session.run
        if algo.on_policy:
            length, columns = self._rollout_shape()
            sizes = {"length": length, "num_envs": columns // run.plan.learners}
            return rollout_like(run.plan, run.spec, algo, **sizes)
        assert run.learn.sample is not None
        return jax.eval_shape(run.learn.sample, jax.eval_shape(run.learn.init_replay), key)

    def _rollout_shape(self) -> tuple[int, int]:
        """Returns steps and columns of a rollout."""
        plan = self._session.run.plan
        return plan.learned_length, plan.columns

    def _alone(self, what: str) -> None:
        """Raises InputError where several policies learn, each by itself."""
        if self._session.run.policies.several:
            names = ", ".join(self._session.policies)
            raise InputError(
                f"{what}: it has no policy_id, and this run has several policies ({names}): learn_on_batch(rollout), "
                "with sample() of workers.local_worker(), teaches each of them from its own agents"
            )

    def _check(self, what: str, batch: Any) -> None:
        session = self._session
        cfg, name = session.config, algo_name(session.config)
        from_data = isinstance(session.run.program, Offline)  # which takes no rollouts
        if isinstance(batch, Rollout) and (session.run.algo.on_policy or what == "learn_on_batch") and not from_data:
            shape, wanted = tuple(batch.reward.shape), self._rollout_shape()
            if shape != wanted:
                raise InputError(
                    f"{what}: expected a rollout of {wanted[0]} steps of {wanted[1]} environments, got {shape}: those "
                    "of all workers side by side are concat_samples(rollouts)"
                )
            return
        if session.run.algo.on_policy:
            raise InputError(f"{what}: {name} learns from a Rollout, as sample() gives one, got {_kind(batch)}")
        if not isinstance(batch, Batch | SequenceBatch):
            raise InputError(f"{what}: {name} learns from a Batch, as sample_replay() gives one, got {_kind(batch)}")
        assert cfg.replay is not None
        if len(batch.weight) != cfg.replay.batch_size:
            raise InputError(
                f"{what}: expected {cfg.replay.batch_size} rows, as replay.batch_size says, got {len(batch.weight)}"
            )


def counted(rollout: Rollout, policies: Policies | None = None) -> Clock:
    """Returns the steps of a rollout, of environments and of agents, as an iteration counts them.

    Where the rows of a game's agents do not stand side by side, each policy marks the game's steps that it has part in
    (`COUNTS_STEP`): the steps are those of the policy that has part in most.

    Args:
      rollout: on the host.
      policies: of the run; None: one.
    """
    mask = np.asarray(rollout.mask)
    if rollout.over is not None:
        games = mask.reshape(*np.shape(rollout.over), -1).any(-1).sum()
    elif COUNTS_STEP in rollout.extras:
        leads = mask & np.asarray(rollout.extras[COUNTS_STEP])
        if POLICY_ID in rollout.extras:  # who follows which policy may differ from game to game
            _, who = np.unique(np.asarray(rollout.extras[POLICY_ID]), return_inverse=True)
        else:
            columns = policies and policies.columns
            who = np.array(columns.policies if columns else (0,))
            who = np.broadcast_to(np.tile(who, mask.shape[1] // len(who)), mask.shape)
        games = np.bincount(who.reshape(-1), leads.reshape(-1)).max()
    else:
        games = mask.sum()
    return Clock(int(games), int(mask.sum()))


def concat_samples(rollouts: Sequence[Rollout]) -> Rollout:
    """Joins rollouts [T, b] of several workers to one [T, B], in numpy."""
    return parallel.join_columns(jax.device_get(list(rollouts)))


def _moves(name: str) -> bool:
    return name in ("params", "updates") or name.startswith("target_")


def _kind(given: Any) -> str:
    return f"a {type(given).__name__}"
