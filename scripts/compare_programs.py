"""Does a change leave the programs of the algorithms as they are? Compares what two commits trace.

    python scripts/compare_programs.py main HEAD
    python scripts/compare_programs.py 8c27f96 . --only ppo dqn      # a directory stands for itself

Traces init, act, update and ingest of every algorithm, with its defaults and with its options on, of vectors, with an
action mask, with a memory and inside of a mapped axis, and all functions of every replay buffer; and compares the
equations. Names of variables, the order of equations and of what goes in and out do not count. Prints the programs that
differ, with the lines; exits with 1 if there are any.
"""

import argparse
import contextlib
import difflib
import hashlib
import importlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

_CLIPPED = {
    "normalize_obs": True,
    "normalize_reward": True,
    "kl_coef": 0.2,
    "kl_target": 0.01,
    "target_kl": 0.5,
    "value_clip_eps": 0.2,
    "lr": ((0, 3e-4), (200, 1e-4)),
}
# options of each algorithm, switched on at once
OPTIONS = {
    "a2c": {"gae_lambda": 0.9, "normalize_obs": True, "normalize_reward": True, "normalize_advantage": True},
    "ppo": _CLIPPED,
    "impala": {"clip_rho": 1.5, "normalize_obs": True, "normalize_reward": True, "num_epochs": 2, "num_minibatches": 2},
    "appo": {**_CLIPPED, "target_update_every": 3, "tau": 0.5},
    "trpo": {"cg_steps": 3, "line_search_steps": 4, "normalize_obs": True, "normalize_reward": True},
    "vmpo": {"top_share": 0.7, "normalize_obs": True, "normalize_reward": True},
    "reppo": {"q_lambda": 0.9, "normalize_obs": True, "normalize_reward": True},
    "pqn": {"loss": "huber", "normalize_obs": True, "normalize_reward": True},
    "dqn": {"double": True, "dueling": True, "noisy": True, "head": "c51", "tau": 0.1, "normalize_obs": True},
    "iqn": {"double": True, "num_quantiles": 5, "tau": 0.1, "normalize_obs": True},
    "sac": {"num_critics": 3, "target_critics": 2, "policy_every": 2, "normalize_reward": True, "max_grad_norm": 0.5},
    "td3": {"num_critics": 3, "normalize_obs": True, "max_grad_norm": 0.5},
    "vdn": {"mixer": "qmix", "tau": 0.1, "normalize_obs": True, "max_grad_norm": 0.5},
    "iql": {"num_critics": 3, "normalize_obs": True, "max_grad_norm": 0.5},
    "bc": {"normalize_obs": True, "ent_coef": 0.01, "max_grad_norm": 0.5},
    "marwil": {"weight": "softmax", "normalize_obs": True, "max_grad_norm": 0.5},
    "mpo": {"num_samples": 3, "target_update_every": 2, "normalize_obs": True, "max_grad_norm": 0.5},
    "fql": {"flow_steps": 3, "normalize_q": True, "normalize_obs": True, "max_grad_norm": 0.5},
    "awr": {"normalize_obs": True, "max_grad_norm": 0.5},
    "dt": {"target_return": 2.0, "normalize_obs": True, "max_grad_norm": 0.5},
    "distill": {"student_acts": 0.5, "normalize_obs": True, "max_grad_norm": 0.5},
    "ars": {"top_directions": 2, "alive_bonus": 0.2},
    "es": {"alive_bonus": 0.2, "max_grad_norm": 0.5},
    "cma_es": {"normalize_obs": True},
    "alphazero": {"gae_lambda": 0.9, "normalize_obs": True, "max_grad_norm": 0.5},
    "muzero": {"unroll_steps": 2, "normalize_obs": True},
    "spo": {"gae_lambda": 0.9, "normalize_obs": True, "max_grad_norm": 0.5},
}
# fields of States, as they were called -> as they are
RENAMED = {
    ".target_critic": ".target_params['critic']",
    "[0].kl_coef": "[0].own['kl_coef']",
    "[0].noise": "[0].own['noise']",
    "[0].policy_metrics": "[0].own['policy_metrics']",
    "[0].policy_loss": "[0].own['policy_loss']",
}
SHAPES = ("vector", "masked", "memory", "mapped")
REPLAY = "replay"  # among the names of algorithms: what all of them that replay stand on
BUFFERS = {
    "ring": {},
    "prioritized": {"alpha": 0.6, "beta": 0.4},
    "sequences": {"length": 4, "burn_in": 2},
    "sequences by priority": {"length": 4, "burn_in": 2, "alpha": 0.6, "beta": 0.4},
}
STACKS = {"frames alone": None, "stacks": (3, 0, True), "stacks that go on": (3, -1, False)}
_LENGTH, _ENVS = 8, 4
_NUMBERS = {"return_to_go": "float32", "timestep": "int32"}  # what data sets tell of each step


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    p.add_argument("commits", nargs="*", metavar="COMMIT", help="two of them, or directories")
    known = [*OPTIONS, REPLAY]
    p.add_argument("--only", nargs="*", choices=known, default=known, help="algorithms (default: all)")
    p.add_argument("--dump", action="store_true", help="print the programs of this Python path as JSON, and end")
    args = p.parse_args(argv)
    if args.dump:
        json.dump(dict(programs(args.only)), sys.stdout)
        return 0
    if len(args.commits) != 2:
        p.error("give two commits, or directories")
    before, after = (dumped(commit, args.only) for commit in args.commits)
    differing = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    for name in differing:
        lines = (program.get(name, "").splitlines() for program in (before, after))
        print(f"== {name}", *difflib.unified_diff(*lines, *args.commits, lineterm="", n=0), sep="\n")
    print(f"{len(after)} programs, {len(differing)} differ: {', '.join(differing) or 'none'}")
    return int(bool(differing))


def dumped(commit: str, only: list[str]) -> dict[str, str]:
    """The programs of a commit by name."""
    with checked_out(commit) as directory:
        script = directory / "scripts" / Path(__file__).name  # its own: functions may have other names there
        command = [sys.executable, str(script), "--dump", "--only", *only]
        env = {**os.environ, "PYTHONPATH": str(directory), "JAX_PLATFORMS": "cpu"}
        return json.loads(subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout)


@contextlib.contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """A directory with the files of a commit, or the directory that it names."""
    if Path(commit).is_dir():
        yield Path(commit).resolve()
        return
    root = Path(__file__).resolve().parent.parent
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name) / "tree"
        subprocess.run(
            ["git", "-C", str(root), "worktree", "add", "-q", "--detach", str(directory), commit], check=True
        )
        try:
            yield directory
        finally:
            subprocess.run(["git", "-C", str(root), "worktree", "remove", "--force", str(directory)], check=True)


def programs(only: list[str]) -> Iterator[tuple[str, str]]:
    """(name, text) of each program."""
    if REPLAY in only:
        for name, stack, in_step in itertools.product(BUFFERS, STACKS, (True, False)):
            label = f"{REPLAY} {name}, {stack}, {'one head' if in_step else 'own heads'}"
            yield from _of_replay(name.split()[0], BUFFERS[name], STACKS[stack], in_step, label)
    from jrl import algos

    for name in [name for name in only if name != REPLAY and name in algos.names()]:  # a commit may lack some
        for options in ("default", "options"):
            for shape in SHAPES:
                if shape == "memory" and not getattr(algos.get_config_class(name), "has_memory", True):
                    continue
                yield from _of(name, OPTIONS[name] if options == "options" else {}, shape, f"{name} {options} {shape}")


def _of(name: str, options: dict, shape: str, label: str) -> Iterator[tuple[str, str]]:
    import jax
    import jax.numpy as jnp

    from jrl import algos
    from jrl.fields.hyper import Gru, NetworkConfig
    from jrl.types import Batch, Box, Dict, Discrete, EnvSpec, MultiBinary, SequenceBatch, Window, element

    if name == "vdn":  # it acts for a team
        spec = _team()
    else:
        box = Box((2,), low=-1.0, high=1.0)
        own = [("action_mask", MultiBinary((3,)))] if shape == "masked" and name != "td3" else []
        own += [("prev_reward", Box(()))] if name == "dt" else []
        obs = Dict((*own, ("vector", Box((4,))))) if own else Box((4,))
        spec = EnvSpec(obs, box if name == "td3" or (name == "sac" and shape != "masked") else Discrete(3), _ENVS)
    obs = spec.observation
    network = NetworkConfig(hidden=(8,), core=Gru(size=8)) if shape == "memory" else NetworkConfig(hidden=(8,))
    module = algos.get(name)
    axis = {"axis_name": "d"} if shape == "mapped" else {}
    own = {"teacher": _teacher(spec)} if name == "distill" else {}
    algo = module.make(module.Config(**options), spec, network, **axis, **own)

    trace = lambda function, *args: _traced(function, args, [("d", 2)] if axis else None)
    key = jax.random.key(0)
    state = jax.eval_shape(algo.init, key)
    actor = jax.eval_shape(algo.actor, state)
    like = lambda space, *lead: jax.tree.map(lambda x: jax.ShapeDtypeStruct((*lead, *x.shape), x.dtype), element(space))
    array = lambda dtype, *dims: jax.ShapeDtypeStruct(dims, dtype)
    carry = jax.eval_shape(lambda: algo.carry(_ENVS))
    rollout = _rollout(algo, spec, actor, carry, like, array)
    yield f"{label} init", trace(algo.init, key)
    for explore in (True, False):
        act = lambda actor, obs, carry, key, explore=explore: algo.act(actor, obs, carry, key, explore)
        yield f"{label} act explore={explore}", trace(act, actor, like(obs, _ENVS), carry, key)
    if algo.ingest is not None:
        yield f"{label} ingest", trace(algo.ingest, state, rollout)
    data = rollout
    if not algo.on_policy and algo.sequences:
        n, length = 6, 5
        # the successor, and two to burn in; from data sets (of earlier commits: Fixed) the successor alone
        rows = length + (1 if type(algo.data).__name__ in ("Fixed", "DataSets") else 3)
        # a data set keeps no memory of networks: sequences begin with that of an episode's start
        memory = jax.tree.map(lambda x: array(x.dtype, n, *x.shape[1:]), getattr(carry, "memory", ()))
        window = Window(like(obs, n, rows), memory, array(jnp.bool_, n, rows))
        numbers = [array(jnp.float32, n, length)] * 2
        ahead, weight = array(jnp.int32, n, length), array(jnp.float32, n, length)
        told = _told(like, array, spec, n, length)
        data = SequenceBatch(window, like(spec.action, n, length), *numbers, ahead, weight, array(jnp.int32, n), **told)
    elif not algo.on_policy:
        numbers = [array(jnp.float32, 6)] * 3
        seen = like(obs, 6)
        told = _told(like, array, spec, 6)
        data = Batch(seen, like(spec.action, 6), *numbers[:2], seen, numbers[2], array(jnp.int32, 6), **told)
    yield f"{label} update", trace(algo.update, state, data, key)


def _teacher(spec):
    """A policy of PPO with its first weights."""
    import jax

    from jrl.algos import distill, ppo

    algo = ppo.make(ppo.Config(), spec)
    return distill.Teacher(algo, algo.actor(algo.init(jax.random.key(0))), spec)


def _team():
    """The spaces of a team of two agents with three actions each."""
    from jrl.envs import team
    from jrl.types import Box, EnvSpec, MultiDiscrete

    return EnvSpec(team.joint_observation(Box((4,)), 2), MultiDiscrete((3, 3)), _ENVS)


def _told(like, array, spec, *lead: int) -> dict:
    """The extras of a sample, with what algorithms read beside transitions; none at commits whose samples have none."""
    import jax.numpy as jnp

    from jrl.types import Batch

    if "extras" not in Batch.__dataclass_fields__:
        return {}
    after = {"action": like(spec.action, *lead), "valid": array(jnp.bool_, *lead)}
    numbers = {name: array(dtype, *lead) for name, dtype in _NUMBERS.items()}
    return {"extras": {"next_action": after, **numbers}}


def _rollout(algo, spec, actor, carry, like, array):
    """A Rollout of shapes, with the extras that acting leaves."""
    import jax
    import jax.numpy as jnp

    from jrl.types import Rollout

    out = jax.eval_shape(algo.act, actor, like(spec.observation, _ENVS), carry, jax.random.key(0))
    extras = jax.tree.map(lambda x: array(x.dtype, _LENGTH, *x.shape), out.extras)
    if algo.running_return_gamma is not None:
        extras = {**extras, "running_return": array(jnp.float32, _LENGTH, _ENVS)}
    if not algo.on_policy:
        extras |= {name: array(dtype, _LENGTH, _ENVS) for name, dtype in _NUMBERS.items()}
    flag = array(jnp.bool_, _LENGTH, _ENVS)
    return Rollout(
        obs=like(spec.observation, _LENGTH, _ENVS),
        last_obs=like(spec.observation, _ENVS),
        action=like(spec.action, _LENGTH, _ENVS),
        reward=array(jnp.float32, _LENGTH, _ENVS),
        terminated=flag,
        truncated=flag,
        mask=flag,
        contiguous=array(jnp.bool_, _ENVS),
        extras=extras,
        carry=carry,
    )


def _of_replay(module: str, options: dict, stack: tuple | None, in_step: bool, label: str) -> Iterator[tuple[str, str]]:
    import jax
    import jax.numpy as jnp

    from jrl.replay.ring import FrameStack
    from jrl.types import Rollout

    array = lambda dtype, *dims: jax.ShapeDtypeStruct(dims, dtype)
    pictures = (6, 6, 3) if stack and stack[1] == -1 else (3, 6, 6)
    obs, action = {"picture": array(jnp.uint8, *pictures), "vector": array(jnp.float32, 2)}, array(jnp.int32)
    extras = {"carry": array(jnp.float32, 5), "other": array(jnp.float32)}
    sizes = {"capacity": 64 * _ENVS, "num_envs": _ENVS, "batch_size": 6, "gamma": 0.9, "n_step": (1, 3)}
    stacked = {"frame_stack": None if stack is None else FrameStack(*stack)}
    make = importlib.import_module(f"jrl.replay.{module}").make
    buffer = make(obs, action, **sizes, **stacked, extras=extras, in_step=in_step, **options)
    rows = lambda tree, *lead: jax.tree.map(lambda x: array(x.dtype, *lead, *x.shape), tree)
    each = lambda dtype: array(dtype, _LENGTH, _ENVS)
    ends = {name: each(jnp.bool_) for name in ("terminated", "truncated", "mask")}
    rollout = Rollout(
        obs=rows(obs, _LENGTH, _ENVS),
        last_obs=rows(obs, _ENVS),
        action=rows(action, _LENGTH, _ENVS),
        reward=each(jnp.float32),
        **ends,
        contiguous=array(jnp.bool_, _ENVS),
        extras=rows(extras, _LENGTH, _ENVS),
        carry=(),
        count=None if in_step else array(jnp.int32, _ENVS),
    )
    state, key = jax.eval_shape(buffer.init), jax.random.key(0)
    asked = {"add": (rollout,), "sample": (key,), "can_sample": (), "size": (), "live": ()}
    if buffer.set_priority is not None:
        asked["set_priority"] = (array(jnp.int32, 6), array(jnp.float32, 6))
    yield f"{label}: init", _traced(buffer.init, ())
    for name, given in asked.items():
        yield f"{label}: {name}", _traced(getattr(buffer, name), (state, *given))


def _traced(function, args: tuple, axis_env=None) -> str:
    import jax

    try:
        return canonical(jax.make_jaxpr(function, axis_env=axis_env)(*args).jaxpr, _names(args))
    except Exception as e:  # one commit may have a defect that the other has not
        return f"{type(e).__name__}: {e}"


def canonical(jaxpr, given: list[str] | None = None) -> str:
    """The equations of a jaxpr that its outputs need, sorted, a line each: `result = operation arguments`.

    A variable has the name of what it is computed from, so that the same program has the same lines in whatever order
    it was traced, and what is computed twice counts once.

    Args:
      given: names of what goes in; None: by position.
    """
    known: dict = dict(zip(map(id, jaxpr.invars), given or [f"in{i}" for i in range(len(jaxpr.invars))], strict=True))
    known |= {id(x): f"const{i}:{x.aval.str_short()}" for i, x in enumerate(jaxpr.constvars)}
    name = lambda x: f"{x.val!r}" if hasattr(x, "val") else known[id(x)]
    lines, needs = {}, {}
    for equation in jaxpr.eqns:
        what = [equation.primitive.name]
        for key, value in sorted(equation.params.items()):
            items = value if isinstance(value, tuple | list) else (value,)
            if any(hasattr(getattr(x, "jaxpr", x), "eqns") for x in items):
                what += [f"{{{canonical(getattr(x, 'jaxpr', x))}}}" for x in items]
            elif key not in ("name", "debug", "debug_info", "ctx_mesh") and "at 0x" not in str(value):
                what.append(f"{key}={value}")
        arguments = [name(x) for x in equation.invars]
        digest = hashlib.sha256("\n".join(what + arguments).encode()).hexdigest()[:10]
        for i, x in enumerate(equation.outvars):
            known[id(x)] = f"{digest}.{i}:{x.aval.str_short()}"
            needs[known[id(x)]] = digest
        lines[digest] = (f"{digest} = {' '.join(what)} {' '.join(arguments)}", arguments, bool(equation.effects))
    out = [name(x) for x in jaxpr.outvars]
    wanted, kept = [needs[x] for x in out if x in needs] + [d for d, line in lines.items() if line[2]], set()
    while wanted:
        if (digest := wanted.pop()) not in kept:
            kept.add(digest)
            wanted += [needs[x] for x in lines[digest][1] if x in needs]
    out = sorted(out) if given else out
    return "\n".join([*sorted(lines[digest][0] for digest in kept), *(f"-> {x}" for x in out)])


def _names(tree) -> list[str]:
    """Of the arrays that go in: their paths, those of before under the names of today."""
    import jax

    found = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)]
    for before, after in RENAMED.items():
        found = [name.replace(before, after) for name in found]
    return found


if __name__ == "__main__":
    sys.exit(main())
