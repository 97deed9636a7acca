"""The moments of callbacks: which are called, in which order and with what; what of them runs inside a program."""

import json
from types import SimpleNamespace

import counting_envs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl import callbacks, envs, registry, train
from jrl.callbacks import CallbackList, Callbacks, in_program, load, make_multi_callbacks
from jrl.errors import InputError
from jrl.fields.data import Fresh
from jrl.learn import learner
from jrl.rollout import sources
from jrl.rollout.unroll import RAW_STEPS
from jrl.run.store import checkpoint
from jrl.types import ActOut, Algo, Batch, Rollout, UpdateAux

T, B = 12, 3
ACTOR = {"w": jnp.zeros(1)}
KINDS = {
    "gymnasium": {"backend": "gymnasium"},
    "envpool": {"backend": "envpool", "host": True},
    "jax": {"backend": "jax"},
}


def act(actor, obs, carry, key, explore=True):
    """Always to the same side: the pole falls within ten steps."""
    return ActOut(jnp.zeros(obs.shape[:1], jnp.int32), (), {})


def source_of(kind, called, *, id="CartPole-v1", **options):
    env = envs.make(id, num_envs=B, **KINDS[kind])
    told = called.collecting(env)[0] if called else {}
    return sources.make(env, act, key=jax.random.key(0), length=T, **told, **options)


def context(i):
    return {"size": 10 + i}


class All(Callbacks):
    """Writes down every moment."""

    def __init__(self):
        self.calls = []


def _noting(name):
    def method(self, **kwargs):
        assert set(kwargs) == set(callbacks.MOMENTS[name])
        episode = kwargs.get("episode")
        self.calls.append((name, None if episode is None else (episode.in_evaluation, episode.episode_id)))

    return method


for _name in callbacks.MOMENTS:
    setattr(All, _name, _noting(_name))


@pytest.mark.parametrize("kind", KINDS)
def test_every_moment_in_its_order(kind):
    made = All()
    called = CallbackList(made)
    called.check(on_policy=True)
    source = source_of(kind, called)
    called.created(source, context)
    called.begin("algorithm", {"default_policy": "policy"})
    subs = ["on_sub_environment_created"] * (B if kind == "gymnasium" else 0)
    before = ["on_environment_created", *subs, "on_create_policy", "on_algorithm_init"]
    assert [name for name, _ in made.calls] == before

    watch, ended = called.watch(source, B), 0
    for i in range(3):
        made.calls.clear()
        ended += int(watch.next(ACTOR, jax.random.key(i))[1].count)
        names = [name for name, _ in made.calls]
        assert names[-3:] == ["on_postprocess_trajectory", "on_sample_end", "on_learn_on_batch"]
        assert set(names[:-3]) <= set(callbacks.EPISODE_MOMENTS)
        steps = T * B - int(names.count("on_episode_end"))
        assert steps - B <= names.count("on_episode_step") <= steps
    assert ended >= 2 * B

    made.calls.clear()
    called.call("on_evaluate_start", algorithm="algorithm")
    evaluated = called.episode_watch(B)
    for i in range(2):
        evaluated(jax.device_get(source.next(ACTOR, jax.random.key(i))[0]))
    called.call("on_evaluate_end", algorithm="algorithm", evaluation_metrics={})
    called.call("on_train_result", algorithm="algorithm", result={})
    called.call("on_checkpoint_loaded", algorithm="algorithm")
    replaced = SimpleNamespace(recreated=[1])
    for _ in range(2):  # each is told of once
        called.recreated("algorithm", "workers", replaced)
    names = [name for name, _ in made.calls]
    assert names[0] == "on_evaluate_start"
    assert names[-4:] == ["on_evaluate_end", "on_train_result", "on_checkpoint_loaded", "on_workers_recreated"]
    # numbers of their own, and each from its beginning on
    by_episode = {}
    for name, which in made.calls:
        if which is not None:
            by_episode.setdefault(which, []).append(name.removeprefix("on_episode_"))
    assert list(by_episode) == [(True, i) for i in range(len(by_episode))]
    for told in by_episode.values():
        steps = told.count("step")
        assert told in (["created", "start", *["step"] * steps, *end] for end in ([], ["end"]))
    watch.close()


class PoleAngle(Callbacks):
    """RLlib's example: the mean angle of an episode. With the older arguments."""

    def on_episode_start(self, *, worker, base_env, policies, episode, env_index, **kwargs):
        assert episode.length == 0
        episode.user_data["angles"] = []
        episode.hist_data["angles"] = []

    def on_episode_step(self, *, worker, episode):
        angle = float(abs(episode.last_observation_for()[2]))
        assert angle == abs(episode.get_observations(-1)[2])
        episode.user_data["angles"].append(angle)

    def on_episode_end(self, *, episode, **kwargs):
        angles = episode.user_data["angles"]
        assert len(angles) == len(episode) == len(episode.actions) == len(episode.get_rewards())
        episode.custom_metrics["pole_angle"] = np.mean(angles)
        episode.hist_data["angles"] = angles


@pytest.mark.parametrize("keep", [False, True])
def test_custom_metrics_are_those_of_the_episodes(keep):
    called = CallbackList(load(["test_callbacks:PoleAngle"]), keep_per_episode=keep)
    source = source_of("jax", called)
    watch = called.watch(source, B)
    angles, each = [[] for _ in range(B)], []
    for i in range(3):
        rollout, _ = watch.next(ACTOR, jax.random.key(i))
        obs = np.concatenate([rollout.obs[1:], rollout.last_obs[None]])
        for t, b in np.argwhere(np.asarray(rollout.mask)):
            angles[b].append(abs(obs[t, b, 2]))
            if rollout.terminated[t, b]:
                each.append(np.mean(angles[b]))
                angles[b] = []
    row = called.drain()
    assert len(each) >= B
    hist = row.pop("hist/angles")
    assert len(hist) > len(each)
    if keep:
        np.testing.assert_allclose(row["custom/pole_angle"], each, rtol=1e-6)
    else:
        found = [row[f"custom/pole_angle_{kind}"] for kind in ("mean", "min", "max")]
        np.testing.assert_allclose(found, [np.mean(each), min(each), max(each)], rtol=1e-6)
    assert called.drain() == {}

    evaluated = called.episode_watch(B)
    for i in range(3):
        evaluated(source.next(ACTOR, jax.random.key(i))[0])
    assert set(called.drain()) == {f"evaluation/{name}" for name in (*row, "hist/angles")}


def test_a_metric_that_is_no_number_is_named():
    class Wrong(Callbacks):
        def on_episode_end(self, *, episode, **kwargs):
            episode.custom_metrics["colour"] = "red"

    called = CallbackList(Wrong())
    watch = called.watch(source_of("jax", called), B)
    with pytest.raises(TypeError, match=r"custom_metrics\['colour'\] is 'red': expected a number"):
        watch.next(ACTOR, jax.random.key(0))


def test_the_return_is_the_reported_one_whatever_the_learner_sees():
    class Totals(Callbacks):
        def on_episode_end(self, *, episode, **kwargs):
            episode.custom_metrics["total"] = episode.total_reward
            assert episode.total_reward == episode.rewards.sum() == episode.length

    called = CallbackList(Totals(), keep_per_episode=True)
    source = source_of("envpool", called, reward_transform=envs.reward_transform(0.25, is_atari=False))
    watch = called.watch(source, B)
    rollout, report = watch.next(ACTOR, jax.random.key(0))
    assert set(np.unique(rollout.reward)) <= {0.0, 0.25}
    assert sum(called.drain()["custom/total"]) == float(report.return_sum) > 0
    watch.close()


# ---------------------------------------------------------------- batches


class Doubles(Callbacks):
    order: list = []  # noqa: RUF012

    def on_sample_end(self, *, samples, **kwargs):
        self.order.append("doubles")
        return samples.replace(reward=np.asarray(samples.reward) * 2)

    def on_train_result(self, *, result, **kwargs):
        result["seen"] = [*result.get("seen", []), "doubles"]


class Adds(Callbacks):
    def on_sample_end(self, *, samples):
        Doubles.order.append("adds")
        return samples.replace(reward=samples.reward + 1)

    def on_learn_on_batch(self, *, train_batch, result, **kwargs):
        result["largest"] = train_batch.reward.max()

    def on_train_result(self, *, result, **kwargs):
        result["seen"] = [*result.get("seen", []), "adds"]


@pytest.mark.parametrize("reverse", [False, True])
def test_several_callbacks_hand_on_what_they_changed(reverse):
    Doubles.order.clear()
    classes = [Adds, Doubles] if reverse else [Doubles, Adds]
    called = CallbackList(make_multi_callbacks(classes)())
    assert not called.needs_episodes
    assert called.needs_rollouts
    assert called.collecting(None) == ({}, "")
    source = source_of("jax", None)
    watch = called.watch(source, B)
    rollout, _ = watch.next(ACTOR, jax.random.key(0))
    mask = np.asarray(rollout.mask)
    largest = 4.0 if reverse else 3.0
    np.testing.assert_array_equal(rollout.reward, np.where(mask, largest, 2.0 if reverse else 1.0))
    assert isinstance(rollout.reward, jax.Array)
    assert Doubles.order == (["adds", "doubles"] if reverse else ["doubles", "adds"])
    assert called.drain() == {"learner/largest": largest}
    result = {}
    called.call("on_train_result", algorithm=None, result=result)
    assert result["seen"] == Doubles.order


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.replace(reward=np.zeros((T, B + 1), np.float32)), "on_sample_end returned a Rollout of other"),
        (lambda r: r.replace(reward=np.asarray(r.reward, np.float64).astype(np.int32)), "of other shapes or dtypes"),
        (lambda r: r.reward, "expected a Rollout, or None"),
    ],
)
def test_a_rollout_that_does_not_fit_is_refused(change, message):
    class Wrong(Callbacks):
        def on_sample_end(self, *, samples, **kwargs):
            return change(samples)

    watch = CallbackList(Wrong()).watch(source_of("jax", None), B)
    with pytest.raises(TypeError, match=message):
        watch.next(ACTOR, jax.random.key(0))


class Pure(Callbacks):
    @in_program
    def on_postprocess_trajectory(self, postprocessed_batch):
        return postprocessed_batch.replace(reward=postprocessed_batch.reward + 1)

    @in_program
    def on_sample_end(self, *, samples):
        return samples.replace(reward=samples.reward * 3)

    @in_program
    def on_learn_on_batch(self, train_batch):
        return train_batch.replace(reward=train_batch.reward - 1), {"mean": train_batch.reward.mean()}


def averaging():
    """An algorithm whose state is the sum of its losses, which are mean rewards."""

    def update(state, batch, key):
        loss = batch.reward.mean()
        return state + loss, UpdateAux({"loss/mean": loss})

    nothing = lambda *args: ()
    return Algo(lambda key: jnp.zeros(()), lambda s: s, nothing, act, update, Fresh())


def test_pure_moments_run_inside_the_program():
    called = CallbackList(Pure())
    assert not called.needs_rollouts
    called.check(on_policy=False)
    algo = learner.transform_batches(averaging(), called.batch_transforms())
    learn = learner.transform_rollouts(learner.on_policy(algo), called.program_transforms())
    row = jnp.zeros((2, 1))
    flags = (jnp.zeros((2, 1), bool),) * 3
    rollout = Rollout(row, row[0], row, jnp.array([[1.0], [4.0]]), *flags, jnp.ones(1, bool), {}, ())
    state, _, metrics = jax.jit(learn.step)(jnp.zeros(()), (), rollout, jax.random.key(0))
    # (1 + 1) * 3 = 6 and (4 + 1) * 3 = 15: the batch has mean 10.5, and the loss is one less
    assert float(state) == float(metrics["loss/mean"]) == 9.5
    assert float(metrics["learner/mean"]) == 10.5
    one = jnp.ones(2)
    batch = Batch(one, one, jnp.array([2.0, 6.0]), one, one, one, jnp.zeros(2, jnp.int32))
    state, aux = jax.jit(algo.update)(jnp.zeros(()), batch, jax.random.key(0))
    assert float(state) == 3.0
    assert float(aux.metrics["learner/mean"]) == 4.0


# ---------------------------------------------------------------- what is refused, and what costs nothing


def test_what_cannot_be_had_is_said_before_the_run():
    with pytest.raises(
        InputError, match=r"on_learn_on_batch: .* batches from replay inside the program: mark .*in_program"
    ):
        CallbackList(Adds()).check(on_policy=False)
    CallbackList(Adds()).check(on_policy=True)

    class NeedsInfos(PoleAngle):
        infos = True

    class NoInfos(PoleAngle):
        infos = False

    graph = envs.make("CartPole-v1", backend="jax", num_envs=1)
    gym = envs.make("CartPole-v1", backend="gymnasium", num_envs=1)
    with pytest.raises(InputError, match=r"infos is True, but environments inside a program have none: .*collector"):
        CallbackList(NeedsInfos()).collecting(graph)
    with pytest.raises(InputError, match="env runners do not send them"):
        CallbackList(NeedsInfos()).collecting(gym, env_runners=True)
    assert CallbackList(NeedsInfos()).collecting(gym) == ({"record": True, "record_infos": True}, "")
    assert CallbackList(NoInfos()).collecting(graph) == ({"record": True}, "")
    options, note = CallbackList(PoleAngle()).collecting(graph)
    assert options == {"record": True}
    assert note == "callbacks: episodes have no infos: environments inside a program have none"
    gym.close()


class Misspelt(Callbacks):
    def on_episod_end(self, *, episode, **kwargs):
        pass

    @in_program
    def on_episode_step(self, **kwargs):
        pass

    def on_train_result(self, *, algorithm, results):
        pass


class OfSb3(Callbacks):
    def _on_step(self):
        return True


def test_names_are_checked():
    with pytest.raises(InputError, match=r"OfSb3: _on_step: nothing calls it here: name it on_episode_step"):
        load(["test_callbacks:OfSb3"])
    assert load([]) is None
    key = "custom.callbacks test_callbacks:"
    with pytest.raises(InputError) as caught:
        load(["test_callbacks:Misspelt", "test_callbacks:act"])
    assert caught.value.errors == (
        f"{key}Misspelt: on_episode_step cannot be in_program: only on_postprocess_trajectory, on_sample_end, "
        "on_learn_on_batch can",
        f"{key}Misspelt: on_train_result takes 'results', which it is not given: it gets algorithm, result",
        f"{key}Misspelt: there is no moment on_episod_end: did you mean on_episode_end?",
        f"{key}act: expected a subclass of jrl.callbacks.Callbacks, got {act!r}",
    )
    with pytest.raises(InputError, match="has no function or class PoleAngel: did you mean PoleAngle"):
        load(["test_callbacks:PoleAngel"])
    registry.register("mine", Adds)
    several = load(["mine", "test_callbacks:Doubles"])
    assert [type(part) for part in several.parts] == [Adds, Doubles]
    nested = make_multi_callbacks([type(several), PoleAngle])()
    assert [type(part) for part in nested.parts] == [Adds, Doubles, PoleAngle]


class Ending(Callbacks):
    """Ends a run at the 20th step of an episode, after an evaluation, or after a row: `how`."""

    how = ""

    def on_episode_step(self, *, episode, **kwargs):
        return None if self.how != "step" else np.bool_(episode.length < 20)

    def on_evaluate_end(self, *, evaluation_metrics, **kwargs):
        return self.how != "evaluation"

    def on_train_result(self, *, result, **kwargs):
        if self.how == "done" and result["num_env_steps_sampled_lifetime"] >= 100:
            result["done"] = True
        return True


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("step", "Ending.on_episode_step returned False"),
        pytest.param("sample", "Ending.on_sample_end returned False", marks=pytest.mark.slow),
        ("evaluation", "Ending.on_evaluate_end returned False"),
        pytest.param("row", "Ending.on_train_result returned False", marks=pytest.mark.slow),
        ("done", "a callback set result['done']"),
        pytest.param("", "env_steps reached 512", marks=pytest.mark.slow),
    ],
)
def test_a_callback_can_end_a_run(how, reason, tmp_path, monkeypatch, capsys):
    """With the row and the checkpoint of an end, status 0, and 1 with --as-test, whose criterion is not met."""
    monkeypatch.setattr(Ending, "how", how)
    given = ["--set=env.backend=jax", "--set=env.num_envs=2", "--set=rollout.length=16", "--set=network.hidden=[4]"]
    given += ["--set=run.log=[jsonl]", "--set=run.report_every=64", "--set=evaluation.every=150"]
    given += ["--set=evaluation.duration=1", f"--set=custom.callbacks=[{__name__}:Ending]", "--as-test"]
    stop = ["--stop=env_steps=512", "--stop=episode/return=1e6"]
    assert train.main(["--algo=ppo", "--env=CartPole-v1", *given, *stop, f"--out={tmp_path / 'run'}"]) == 1
    assert f"stopped: {reason}" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "run" / "result.jsonl").read_text().splitlines()]
    steps = rows[-1]["env_steps"]
    assert "done" not in rows[-1] and checkpoint.read_meta(checkpoint.locate(tmp_path / "run"))["env_steps"] == steps
    assert (steps >= 500) == (how == "") and steps > 0


def test_what_nobody_looks_at_costs_nothing():
    class OfRows(Callbacks):
        def on_train_result(self, *, result, **kwargs):
            pass

    called = CallbackList(OfRows())
    assert (called.needs_rollouts, called.needs_episodes, called.needs_infos) == (False, False, False)
    assert called.program_transforms() == called.batch_transforms() == ()
    source = source_of("jax", called)
    assert RAW_STEPS not in source.next(ACTOR, jax.random.key(0))[0].extras


def test_what_a_callback_raises_ends_the_run():
    class Raises(Callbacks):
        def on_episode_end(self, **kwargs):
            raise ArithmeticError("mine")

    called = CallbackList(Raises())
    watch = called.watch(source_of("jax", called), B)
    with pytest.raises(ArithmeticError, match="mine") as caught:
        watch.next(ACTOR, jax.random.key(0))
    assert caught.traceback[-1].name == "on_episode_end"


@pytest.mark.parametrize("remote", [False, True])
def test_environments_are_told_of_where_they_are(remote):
    env = envs.make(
        "counting_envs:Counter", backend="gymnasium", num_envs=2, remote_worker_envs=remote, options={"size": 7}
    )
    called = CallbackList(counting_envs.Marks())
    source = sources.make(env, act, key=jax.random.key(0), length=2)
    called.created(source, context)
    assert source.foreach_env(lambda env: env.unwrapped.mark) == [(i, 7, remote) for i in range(2)]
    source.close()
