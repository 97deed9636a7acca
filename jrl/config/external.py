"""The `external` section: episodes played by clients over HTTP."""

from typing import Annotated, Any

from annotated_types import Interval

from jrl.fields.bounds import Amount, Count, Few, NonNegative, Positive, Seconds
from jrl.fields.data import Fresh, learns_from, traits
from jrl.fields.validation import section

_LAG = 4  # updates, for algorithms that learn from rollouts without a correction for old weights


@section
class ExternalConfig:
    """Episodes that clients play over HTTP (python -m jrl.serve), at most env.num_envs at a time."""

    # spaces of the clients' observations and actions: {box: [4]}, {box: [2], low: -1, high: 1},
    # {box: [84, 84, 4], dtype: uint8}, {discrete: 2}, {multi_discrete: [3, 2]}, {multi_binary: [4]},
    # {dict: {name: ...}}, {tuple: [...]}; null: the spaces of `spaces` or env.id
    observation: dict[str, Any] | None = None
    action: dict[str, Any] | None = None
    # names of the agents of an episode; observation and action then are the space of all agents, or {name: space}.
    # null: one agent, or the agents of `spaces` or env.id
    agents: tuple[str, ...] | None = None
    spaces: str | None = None  # run directory or checkpoint from which only the spaces are read
    host: str = "127.0.0.1"  # address to listen at; an address that others can reach needs a token
    port: Annotated[int, Interval(ge=0, le=65_535)] = 9900  # 0: any free port, which the command prints
    token_file: str | None = None  # file whose first line is the clients' token; null: no token
    certificate: str | None = None  # file of a TLS certificate, PEM; null: no TLS
    private_key: str | None = None  # file of the certificate's key; null: in the file of the certificate
    origins: tuple[str, ...] = ()  # web pages that may connect, as http://HOST:PORT; *: all, with a token
    timeout_s: Seconds = 60.0  # silence of a client after which its episode fails and its connection is closed
    max_wait_ms: Annotated[float, Interval(ge=0, le=1000)] = 1.0  # longest wait of a request for others of its batch
    # most updates between the weights that chose an action and the update that learns from it; older steps are dropped.
    # null: 4 for ppo; no limit with replay and for impala and appo, which correct for old weights
    max_lag: Amount | None = None
    max_body_mb: Positive = 16.0  # size of a request
    max_clients: Count = 256  # connections at a time
    max_rate: NonNegative = 0.0  # requests per second of a connection; 0: no limit
    max_batch: Few = 256  # episodes in one request


def max_lag(given: ExternalConfig, algo: Any) -> int | None:
    """Returns the most updates between acting weights and the update that learns from their steps; None: no limit."""
    any_age = traits(algo).corrects or learns_from(algo) is not Fresh
    return given.max_lag if given.max_lag is not None or any_age else _LAG
