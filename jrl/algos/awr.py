"""Advantage-weighted regression (arXiv:1910.00177): MARWIL's two regressions on a replay of its own transitions.

    algo = awr.make(awr.Config(), spec)
    state = algo.init(key)
    out = algo.act(algo.actor(state), obs, algo.carry(batch_size), key)                 # out.action [B, *]
    state = algo.ingest(state, rollout)                         # once per new rollout [T, B]: counts, statistics
    state, aux = jax.jit(algo.update)(state, batch, key)        # batch: jrl.types.Batch; one gradient step

Loss, weights and the scale c of advantages are those of `jrl.algos.marwil`. The target y is the sum of `replay.n_step`
rewards and V(next_obs) of the present value, where the paper has TD(lambda) returns of whole episodes. As in the paper,
nothing corrects for the older policies that acted: keep `replay.capacity` small.
"""

from typing import ClassVar, Unpack

from jrl.algos import actor_critic, bc, marwil
from jrl.algos import agent as agents
from jrl.algos.agent import MakeOptions
from jrl.fields.bounds import Positive
from jrl.fields.data import Replay
from jrl.networks import NetworkConfig
from jrl.types import Algo, EnvSpec, hyperparams

DEFAULT_NETWORK = NetworkConfig()


@hyperparams
class Config(marwil.Config):
    """Hyper-parameters of AWR; a Schedule is a number or `[[env_steps, value], ...]`."""

    learns_from: ClassVar[type] = Replay
    to_end: ClassVar[bool] = False

    adv_norm_start: Positive = 1.0  # initial c^2, the running mean square of advantages, which scales them


def make(cfg: Config, spec: EnvSpec, network: NetworkConfig = DEFAULT_NETWORK, **options: Unpack[MakeOptions]) -> Algo:
    """Makes AWR, a replay-based Algo. Arguments and errors: see `jrl.algos`.

    With `network.shared` the value network shares the policy's torso. A user's loss gets `marwil.Rows` [N].
    """
    agent = bc.make_agent(cfg, spec, network, actor_critic.networks, **options)
    return actor_critic.make_algo(cfg, agent, marwil.update, init=marwil.init, ingest=agents.ingest)
