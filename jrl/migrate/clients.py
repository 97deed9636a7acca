"""Rules for episodes that clients play: RLlib's PolicyServerInput is a run of `python -m jrl.serve`."""

from collections.abc import Mapping
from typing import Any

from jrl.migrate import server_input
from jrl.migrate.job import Job, rule
from jrl.settings.external import ExternalConfig

_SPACES = {"observation_space": "external.observation", "action_space": "external.action"}
_PORT = ExternalConfig().port
_START = "clients play: start it with python -m jrl.serve CONFIG; they use PolicyClient of jrl/serve/client.py"


def of_clients(job: Job, key: str, value: Any) -> None:
    """Makes the section `external` of an input that is PolicyServerInput."""
    config = job.given.get("input_config")
    host, port = server_input.address(value, config if isinstance(config, Mapping) else {})
    known = isinstance(port, int) and not isinstance(port, bool)
    job.put(key, "external.port", port if known else _PORT, _START if known else f"jrl's port; {_START}")
    if isinstance(host, str) and host:
        local = host in ("localhost", "127.0.0.1", "::1")
        job.put(key, "external.host", host, "" if local else "others reach it with a token alone: external.token_file")
    if not job.given.get("env") and job.settled("env.id") is None and not job.inside:
        told = job.settled("external.observation") is not None or job.settled("external.spaces") is not None
        lost = () if told else [name for name in _SPACES if name not in job.given]
        for name in lost:
            job.faults.append(
                f"{name} is missing: say what clients observe and choose as {_SPACES[name]} does, e.g. "
                "observation_space: {box: [4]} and action_space: {discrete: 2}, or name an environment with these "
                "spaces"
            )


@rule(*_SPACES)
def _space(job: Job, key: str, value: Any) -> None:
    if not job.with_clients:
        return job.drop(key, "spaces come from the environment")
    found = server_input.space(value, acts=key == "action_space")
    if found is None:
        return job.wrong(key, "a space of Gymnasium, or one as {box: [4]} and {discrete: 2}", str(value))
    return job.put(key, _SPACES[key], found)
