"""Speed of a run on one platform, measured for a second: the child process of `jrl.run.platform_choice`.

`python -m jrl.run.platform_probe < config.json` prints a Measurement as JSON.
"""

import dataclasses
import json
import sys
import time

import jax
import numpy as np

from jrl import config
from jrl.config import EvaluationConfig, RunConfig
from jrl.host import runtime
from jrl.run import build
from jrl.run.platform_choice import Measurement
from jrl.run.session import Session

_SECONDS = 1.0  # least duration of a measurement
_WARM_UP = 2  # calls that may compile programs


def measure(cfg: RunConfig) -> Measurement:
    """Measures a run for a second, from its first update on, in this process: acting and learning, nothing else."""
    runtime.apply(cfg.runtime)
    if cfg.devices.platform is None and jax.default_backend() == "cpu":
        return Measurement("cpu", 0.0)
    if cfg.run.compile_cache:
        build.enable_compile_cache()
    with Session(_alone(cfg), endless=True) as session:
        session.start()
        calls, has_learned = 0, False
        while calls < _WARM_UP or not has_learned:
            info = session.advance()
            assert info is not None  # endless
            updates = [x for name, x in info.metrics.items() if name.endswith("train/updates")]
            calls, has_learned = calls + 1, all(np.max(x) > 0 for x in updates)
        start, before = time.perf_counter(), session.counted()
        while time.perf_counter() < start + _SECONDS:
            session.advance()
        steps = session.counted() - before
        jax.block_until_ready(session.state)
        rate = steps / (time.perf_counter() - start)
        return Measurement(session.run.plan.mesh.devices.flat[0].platform, rate)


def _alone(cfg: RunConfig) -> RunConfig:
    """Returns the config without files, evaluations and callbacks, and with updates as soon as there are data."""
    return dataclasses.replace(
        cfg,
        run=dataclasses.replace(cfg.run, out=None, log=(), max_recompiles=None),
        evaluation=EvaluationConfig(),
        data=dataclasses.replace(cfg.data, output=None, estimate=None),
        custom=dataclasses.replace(cfg.custom, callbacks=(), evaluation=None),
        replay=cfg.replay and dataclasses.replace(cfg.replay, learning_starts=0),
    )


if __name__ == "__main__":
    print(json.dumps(measure(config.from_dict(json.load(sys.stdin)))._asdict()))
