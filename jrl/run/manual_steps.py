"""Manual steps of a run outside of its iterations: collect a rollout, update, compute and apply gradients.

Manual steps use the run's environments, where training left them, and its optimizer, guard and devices. Each compiles
its program at its first call.
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
from jrl.run.base_session import BaseSession
from jrl.types import COUNTS_STEP, NOT_FINITE, POLICY_ID, Algo, Batch, Episodes, Key, PyTree, Rollout, SequenceBatch

POLICY = "default_policy"  # id of a single policy, whatever its name
_FIRST = 2**31  # number of the first manual call in keys; the calls of an iteration count from 0


class PolicyIds(NamedTuple):
    """RLlib ids of the policies of a run."""

    ids: tuple[str, ...]
    trained: tuple[str, ...]  # ids of the policies that learn
    policies: Policies

    def resolve(self, policy_id: str) -> str:
        """Returns the id of a policy, `default_policy` being the only one. Raises KeyError: unknown id."""
        if policy_id in self.ids:
            return policy_id
        if policy_id == POLICY and len(self.ids) == 1:
            return self.ids[0]
        raise KeyError(f"policy_id: expected {' or '.join(self.ids)}, got {policy_id!r}: get_policy(policy_id)")

    def split(self, actor: PyTree) -> dict[str, PyTree]:
        """Returns an ActorState of all policies as a dict by id."""
        return self.policies.by_name(actor) if self.policies.several else {self.ids[0]: actor}


def find_policy_ids(session: BaseSession) -> PolicyIds:
    """Returns the policy ids of a run; a single agent has `default_policy`."""
    policies = session.run.policies
    return PolicyIds(policies.names or (POLICY,), policies.trained or (() if policies.names else (POLICY,)), policies)


class LearnerMethods(abc.ABC):
    """RLlib methods for weights and updates, shared by the Algorithm, its workers and its policies."""

    @abc.abstractmethod
    def _learner_session(self, method: str) -> BaseSession:
        """Returns the session. Raises InputError: `method` is called in a process without a session."""

    def set_weights(self, weights: Mapping[str, Any]) -> None:
        """Sets weights from `get_weights`, of some or all policies. Raises ValueError: names or shapes differ."""
        set_weights_by_id(self._learner_session("set_weights"), "set_weights", weights)

    def learn_on_batch(self, samples: Rollout | Batch | SequenceBatch) -> dict[str, float]:
        """Makes one update of the run on `samples`, outside of the iterations of `train`.

        Args:
          samples: a rollout, as from `workers.local_worker().sample()`: all epochs on the rollout; with replay, the
            rollout is added, then learned from if replay has enough. Or a batch from `sample_replay`: a gradient step.
        Returns:
          Metrics of the update.
        Raises:
          InputError: the algorithm does not learn from such samples, or the size differs.
          FloatingPointError: the update was not finite; the state is unchanged.
        """
        return self._learner_session("learn_on_batch").manual_steps.learn(samples)

    def compute_gradients(self, samples: Rollout | Batch | SequenceBatch) -> tuple[PyTree, dict[str, float]]:
        """Returns the gradient of the algorithm's loss at the present parameters; changes nothing.

        All steps of an update use the same parameters: PPO's minibatches give the gradient over the whole rollout,
        SAC's actor uses the present critics.

        Args:
          samples: a rollout (on-policy) or a batch (with replay), as `learn_on_batch`.
        Returns:
          Gradients before clipping, a tree like the parameters, in numpy; metrics of the loss.
        Raises:
          InputError: the algorithm does not learn from such samples, or has its own optimizer.
        """
        return self._learner_session("compute_gradients").manual_steps.gradients(samples)

    def apply_gradients(self, grads: PyTree) -> None:
        """Applies gradients of `compute_gradients` with the run's optimizer, and updates target networks.

        Raises:
          ValueError: shapes differ, or gradients are not finite.
        """
        self._learner_session("apply_gradients").manual_steps.apply(grads)


def set_weights_by_id(session: BaseSession, method: str, weights: Mapping[str, Any]) -> None:
    """Sets the weights of each policy by its id; `method` is the method's name, for error messages."""
    policies = find_policy_ids(session)
    if not weights or set(weights) - {*policies.ids, *([POLICY] if len(policies.ids) == 1 else [])}:
        wanted = ", ".join(f"'{name}': ..." for name in policies.ids)
        raise ValueError(f"{method}: expected {{{wanted}}}, got {', '.join(map(str, weights)) or 'nothing'}")
    for policy_id, given in weights.items():
        session.set_weights(given, policies.resolve(policy_id) if session.policies else None)


class ManualSteps:
    """Makes the manual steps of one run; `programs`: compiled programs by name, to be cleared when the run changes."""

    def __init__(self, session: BaseSession):
        self._session = session
        self._calls = _FIRST
        self.programs: dict[str, Callable[..., Any]] = {}

    def _program(self, name: str, make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        if name not in self.programs:
            self.programs[name] = make()
        return self.programs[name]

    def _number(self) -> tuple[int, int, int]:
        """Returns (seed, iteration, number of this call), for keys."""
        self._calls += 1
        return self._session.config.run.seed, self._session.iteration, self._calls

    def key(self, role: Role) -> Key:
        """Returns a new key at each call."""
        seed, iteration, call = self._number()
        return jax.random.fold_in(role_key(seed, role, iteration), call)

    # ------------------------------------------------------------ sampling

    def sample(self) -> tuple[Rollout, Episodes]:
        """Collects the next rollout [T, B] of all environments, on the host. Its steps are counted when it is learned.

        Raises:
          InputError: EnvPool steps the environments inside the program that learns, or there are no environments.
        """
        session, program = self._session, self._session.run.program
        if isinstance(program, Offline):
            raise InputError(
                "sample: expected environments, but the run learns from data.input only: use sample_replay()"
            )
        if isinstance(program, Fused) and not program.unroll.pure:
            raise InputError(
                f"sample: {session.config.env.id} is stepped by EnvPool inside the program that learns: use "
                "rollout.collector host"
            )
        start = session.run.policies.prepare(program, session.state)
        state, *collected = program.collect(start, *self._number())
        session.replace_state(program.discontinue(state))
        rollout, report = jax.device_get(collected)
        return rollout, report

    def sample_replay(self) -> Batch | SequenceBatch:
        """Returns a batch from replay or data, drawn as for a gradient step, on the host.

        Raises:
          InputError: there is no replay, or replay is empty.
        """
        session = self._session
        self._check_single_policy("sample_replay")
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
        """Makes one update of the run on a batch or rollout: see `LearnerMethods.learn_on_batch`."""
        session = self._session
        self._check("learn_on_batch", batch)
        if isinstance(batch, Rollout):
            program, steps = session.run.program, count_steps(batch, session.run.policies)
            batch = dataclasses.replace(batch, contiguous=np.zeros_like(batch.contiguous))
            placed = parallel.shard(batch, session.run.plan.mesh, parallel.ROLLOUT)
            state, metrics = program.learn(program.discontinue(session.state), placed, *self._number())
        else:
            self._check_single_policy("learn_on_batch of a batch")
            steps = NO_STEPS
            state, metrics = self._learn_batch(batch)
        session.replace_state(state, steps)
        found = {name: float(x) for name, x in jax.device_get(metrics).items()}
        if found.get(NOT_FINITE):
            raise FloatingPointError("learn_on_batch: the update was not finite: the state is unchanged")
        return found

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
        """Returns the gradient of the algorithm's loss, and its metrics: see `LearnerMethods.compute_gradients`."""
        session, run = self._session, self._session.run
        self._check_single_policy("compute_gradients")
        self._check("compute_gradients", batch)
        rollout = isinstance(batch, Rollout)

        def make() -> Callable[..., Any]:
            algo = self._replace_optimizer(gradients.taken)
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
        """Applies gradients with the run's optimizer: see `LearnerMethods.apply_gradients`."""
        session, run = self._session, self._session.run
        self._check_single_policy("apply_gradients")
        state = run.program.keep(session.state).learner
        if (shapes := jax.tree.map(np.shape, given)) != (wanted := jax.tree.map(np.shape, state.params)):
            raise ValueError(f"apply_gradients: expected the shapes {wanted}, got {shapes}")
        if not all(np.isfinite(x).all() for x in jax.tree.leaves(given)):
            raise ValueError("apply_gradients: expected finite gradients: the state is unchanged")

        def make() -> Callable[..., Any]:
            algo = self._replace_optimizer(gradients.given)

            def body(state, given, key):
                like = jax.eval_shape(algo.init, key).opt_state
                put = lambda _, own, gradient: gradients.Given(own, gradient, jnp.zeros((), bool))
                opt_state = jax.tree.map(put, like, state.opt_state, given, is_leaf=gradients.is_node)
                zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self._like(algo, key))
                after = algo.update(dataclasses.replace(state, opt_state=opt_state), zeros, key)[0]
                own = jax.tree.map(lambda node: node.state, after.opt_state, is_leaf=gradients.is_node)
                is_updated = lambda name: name in ("params", "updates") or name.startswith("target_")
                moved = {name: x for name, x in vars(after).items() if is_updated(name)}
                return dataclasses.replace(state, **{**moved, "opt_state": own})

            same = parallel.REPLICATED
            return parallel.pmap(body, run.plan.mesh, (same, same, same), same)

        placed = parallel.replicate(given, run.plan.mesh)
        after = self._program("apply", make)(state, placed, self.key(Role.UPDATE))
        session.replace_state(run.program.assign(session.state, after))

    def _replace_optimizer(self, substitute: Callable[[], Any]) -> Algo:
        """Returns the algorithm with a substitute for the optimizer, see `jrl.algos.gradients`."""
        session = self._session
        with substitute():
            algo = build.algorithm(
                session.config, session.run.spec, axis_name=parallel.AXIS, callback_list=session.callback_list
            )
        found = jax.eval_shape(algo.init, jax.random.key(0))
        nodes = jax.tree.leaves(getattr(found, "opt_state", ()), is_leaf=gradients.is_node)
        if not nodes or not all(map(gradients.is_node, nodes)):
            raise InputError(
                f"gradients: {algo_name(session.config)} has its own optimizer: use learn_on_batch, or let the "
                "algorithm step with jrl.algos.agent.descend"
            )
        return algo

    def _like(self, algo: Algo, key: Key) -> PyTree:
        run = self._session.run
        if algo.on_policy:
            num_envs = run.plan.columns // run.plan.learners
            return rollout_like(run.plan, run.spec, algo, length=run.plan.learned_length, num_envs=num_envs)
        assert run.learn.sample is not None
        return jax.eval_shape(run.learn.sample, jax.eval_shape(run.learn.init_replay), key)

    def _check_single_policy(self, method: str) -> None:
        """Raises InputError: several policies learn."""
        if self._session.run.policies.several:
            names = ", ".join(self._session.policies)
            raise InputError(
                f"{method}: expected a run with one policy, got {names}: use learn_on_batch(rollout) with sample() of "
                "workers.local_worker(), which updates each policy"
            )

    def _check(self, method: str, batch: Any) -> None:
        session = self._session
        cfg, name = session.config, algo_name(session.config)
        from_data = isinstance(session.run.program, Offline)  # offline programs take no rollouts
        if isinstance(batch, Rollout) and (session.run.algo.on_policy or method == "learn_on_batch") and not from_data:
            plan = session.run.plan
            shape, wanted = tuple(batch.reward.shape), (plan.learned_length, plan.columns)
            if shape != wanted:
                raise InputError(
                    f"{method}: expected a rollout of {wanted[0]} steps of {wanted[1]} environments, got {shape}: "
                    "join the rollouts of all workers with concat_samples(rollouts)"
                )
            return
        if session.run.algo.on_policy:
            raise InputError(f"{method}: {name} learns from a Rollout, as from sample(), got a {type(batch).__name__}")
        if not isinstance(batch, Batch | SequenceBatch):
            raise InputError(
                f"{method}: {name} learns from a Batch, as from sample_replay(), got a {type(batch).__name__}"
            )
        assert cfg.replay is not None
        if len(batch.weight) != cfg.replay.batch_size:
            raise InputError(
                f"{method}: expected {cfg.replay.batch_size} rows, by replay.batch_size, got {len(batch.weight)}"
            )


def count_steps(rollout: Rollout, policies: Policies | None = None) -> Clock:
    """Returns the environment and agent steps of a rollout on the host, as an iteration counts them.

    If rows of a game's agents are not aligned in time, `COUNTS_STEP` marks the game steps of each policy: the count is
    that of the policy with most steps. `policies`: of the run; None: one policy.
    """
    mask = np.asarray(rollout.mask)
    if rollout.over is not None:
        games = mask.reshape(*np.shape(rollout.over), -1).any(-1).sum()
    elif COUNTS_STEP in rollout.extras:
        leads = mask & np.asarray(rollout.extras[COUNTS_STEP])
        if POLICY_ID in rollout.extras:  # policies change from game to game
            _, numbers = np.unique(np.asarray(rollout.extras[POLICY_ID]), return_inverse=True)
        else:
            columns = policies and policies.columns
            numbers = np.array(columns.policies if columns else (0,))
            numbers = np.broadcast_to(np.tile(numbers, mask.shape[1] // len(numbers)), mask.shape)
        games = np.bincount(numbers.reshape(-1), leads.reshape(-1)).max()
    else:
        games = mask.sum()
    return Clock(int(games), int(mask.sum()))


def concat_samples(rollouts: Sequence[Rollout]) -> Rollout:
    """Returns the rollouts [T, b] of several workers as one rollout [T, B], in numpy."""
    return parallel.join_columns(jax.device_get(list(rollouts)))
