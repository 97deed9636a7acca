"""Runs of equal configs as one build: a module's second run of a config has the compiled programs of its first."""

import functools
import json
from collections.abc import Callable
from typing import Any

from jrl import config
from jrl.config import RunConfig, Sizes
from jrl.config.sections import CustomConfig
from jrl.learn.offline import Offline
from jrl.learn.population import Population
from jrl.run import build

# what says when a run ends, what it writes and where: nothing of it is compiled, but for the iterations of a call
_BESIDE = {
    "stop": (),
    "evaluation": (),
    "checkpoint": ("every", "keep_last", "keep_best_by"),
    "run": ("out", "log", "report_every"),
}


def kept(make: Callable[..., build.Run]) -> Callable[..., build.Run]:
    """`build.run`, that gives a config's first run again where one program does all and nobody looks on.

    Such a program is a function of the config and its data alone: its state is handed to it, and environments are part
    of that. Configs that name code of the user's (`custom`) are built each time: a name may come to mean another thing.
    A test that changes what is built takes `build.run.__wrapped__`.
    """
    made: dict[str, build.Run] = {}

    @functools.wraps(make)
    def run(cfg: RunConfig, **more) -> build.Run:
        if cfg.custom != CustomConfig() or more.get("callback_list") or more.get("training_step"):
            return make(cfg, **more)
        key = _compiled_of(cfg)
        if key in made:
            return made[key]
        found = make(cfg, **more)
        key += json.dumps(dict(found.data)) if found.data else ""  # checksums
        pure = found.unroll is not None and found.unroll.pure
        if not (found.in_program and (pure or type(found.program) is Offline)):
            return found
        return made.setdefault(key, found)._replace(judge=found.judge)

    return run


def dealt(deal: Callable[[Population], None]) -> Callable[[Population], None]:
    """`Population._deal`, that gives a population's programs again where all that they close over is the same."""
    made: dict[Any, Any] = {}

    def again(self: Population) -> None:
        deal(self)
        key = (id(self.fused), *self._floats, len(self._places), *self._devices)
        first = made.setdefault(key, (self.fused, self._begun, self._advance, self._writing))
        _, self._begun, self._advance, self._writing = first
        self._start = self._begun

    return again


def _compiled_of(cfg: RunConfig) -> str:
    sections = config.to_dict(cfg)
    for section, names in _BESIDE.items():
        own = sections.pop(section)
        if names:
            sections[section] = {name: value for name, value in own.items() if name not in names}
    return json.dumps([sections, Sizes(cfg).iterations_per_call], sort_keys=True, default=repr)
