"""The `external` section: episodes that clients play, and what does not go with them."""

from typing import Annotated, Any

from annotated_types import Interval

from jrl.fields.bounds import Amount, Count, Few, NonNegative, Positive, Seconds
from jrl.fields.data import Fresh, learns_from, traits
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


def max_lag(given: ExternalConfig, algo: Any) -> int | None:
    """Returns the updates that weights may be behind when their steps are learned from; None: any number."""
    any_age = traits(algo).corrects or learns_from(algo) is not Fresh
    return given.max_lag if given.max_lag is not None or any_age else _LAG
