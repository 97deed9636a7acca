"""Value decomposition for a team, from replay: VDN (arXiv:1706.05296) and QMIX (arXiv:1803.11485).

All agents share a network, which returns Q values for each agent. The mixer computes the team's value Q_tot from them
(`jrl.algos.teams`). DQN learns Q_tot, with targets, double, n-step returns, priorities and memory.

    algo = vdn.make(vdn.Config(mixer="qmix"), spec)                        # spec: of a team, jrl.envs.team
    out = algo.act(algo.actor(state), obs, algo.carry(batch_size), key)    # out.action [B, agents]
    state, aux = jax.jit(algo.update)(state, batch, key)                   # batch: jrl.types.Batch; one gradient step

Each agent explores independently. With `network.core` each agent has its own memory, also in replay.
"""

from dataclasses import replace
from typing import Any, ClassVar, Literal, Unpack

from jrl.algos import dqn, parts, q_heads, teams
from jrl.algos.agent import Agent, MakeOptions
from jrl.networks import NetworkConfig
from jrl.types import Algo, Array, EnvSpec, MultiDiscrete, hyperparams

DEFAULT_NETWORK = NetworkConfig(activation="relu", init="uniform")


@hyperparams
class Config(teams.Mixing, dqn.QLearning):
    """Hyper-parameters of VDN and QMIX; a Schedule is a number or `[[env_steps, value], ...]`."""

    acts_in: ClassVar[Any] = MultiDiscrete
    in_teams: ClassVar[bool] = True
    has_learning_pass: ClassVar[bool] = False

    mixer: Literal["sum", "qmix"] = "sum"  # function of the agents' values: their sum (VDN), or QMIX's network
    double: bool = True  # the online network selects the next actions
    loss: Literal["mse", "huber"] = "mse"  # loss of the TD error of Q_tot

    def q_head(self) -> q_heads.QHead:
        """Returns the head of Q_tot."""
        return q_heads.expected(self.loss)

    def reading(self) -> dqn.Reading:
        """Returns the Reading of a team's outputs."""
        return dqn.Reading(flat, teams.by_agent, taken, backup)

    def validate(self) -> list[str]:
        errors: list[str] = []
        if self.conservative:
            errors.append("conservative compares all of one agent's actions, a team has too many: leave it out")
            return errors + replace(self, conservative=False).validate()
        if self.munchausen:
            errors.append("munchausen is for one agent's policy, not for a team's: leave it out")
            return errors + replace(self, munchausen=False).validate()
        return errors + super().validate()


# ---------------------------------------------------------------- functions of the Reading for DQN


def flat(cfg: Config, agent: Agent, heads: Any, mask: Array | None) -> Array:
    """Returns all heads concatenated, [M, A * n + W], with flattened leading axes."""
    return teams.concatenate_heads([x.reshape(-1, x.shape[-1]) for x in heads])


def taken(cfg: Config, agent: Agent, outputs: Array, action: Array) -> Array:
    """Returns Q_tot [M, 1] of actions [M, A]."""
    return teams.taken(cfg, agent, outputs, action)[:, None]


def backup(cfg: Config, agent: Agent, around: dqn.Around, action: Array, reward: Array, discount: Array) -> Array:
    """Returns the target of Q_tot [M, 1], from Q_tot of each agent's best next action."""
    best = teams.best(agent, around.chooser, around.allowed)
    return reward[:, None] + discount[:, None] * taken(cfg, agent, around.after, best)


def make(cfg: Config, spec: EnvSpec, network: NetworkConfig = DEFAULT_NETWORK, **options: Unpack[MakeOptions]) -> Algo:
    """Makes VDN or QMIX, a replay-based Algo. Arguments and errors: see `jrl.algos`.

    `spec` has the spaces of a team (`jrl.envs.team`): a Dict observation with `agents`, and optionally `state`,
    `present` and `action_mask`; actions are MultiDiscrete([n] * A). The network reads one agent's observation; with
    `agent_id` a Dict of `obs` (or the observation's own parts) and `agent_id`. A user's loss gets the team's rows, and
    `net.q` returns [N, A, n]. The `q` [B, A, n] of `outputs` has one row per agent.
    """
    teams.team_of(spec, "vdn")
    network = parts.with_default_init(network, DEFAULT_NETWORK)
    return dqn.assemble(cfg, spec, network, teams.networks, **options)
