"""Table of RLlib's configuration keys and their names in jrl, for `jrl.migrate` and docs/rllib-users.md.

An entry has all names that a key has had, newest first, the key of jrl that it becomes, and notes. A
key without a counterpart has the reason. `jrl.migrate.rules` and `jrl.migrate.hyper` compute what is more than a move.
"""

from typing import Any

from jrl.migrate.key import Key
from jrl.migrate.keys import GROUPS

# name of an algorithm, lower case -> ours, what there is to know
ALGORITHMS = {
    "ppo": ("ppo", ""),
    "ddppo": ("ppo", "jrl's PPO learns data-parallel on all devices"),
    "appo": ("appo", ""),
    "impala": ("impala", ""),
    "a2c": ("a2c", ""),
    "a3c": ("a2c", "workers do not apply gradients of their own: one update learns from all"),
    "dqn": ("dqn", ""),
    "simpleq": ("dqn", "a DQN without further parts"),
    "rainbow": ("dqn", "its parts are keys of dqn: see configs/rainbow.yaml"),
    "apex": (
        "dqn",
        "an epsilon per worker is algo.exploration {name: epsilon_greedy, ladder: true}, "
        "collection beside learning is rollout.mode async",
    ),
    "apex_dqn": ("dqn", "see APEX"),
    "r2d2": ("dqn", "with double, dueling, value_rescaling, prioritised sequences, and network.core lstm"),
    "sac": ("sac", ""),
    "rnnsac": ("sac", "with network.core lstm"),
    "td3": ("td3", ""),
    "ddpg": ("td3", "with num_critics 1, policy_every 1, target_noise 0, as in configs/ddpg.yaml"),
    "bc": ("bc", ""),
    "marwil": ("marwil", ""),
    "cql": ("sac", "with conservative true"),
    "iql": ("iql", ""),
    "dt": ("dt", "one token for each step, of the observation, the action before it and the return to go"),
}
# algorithms of RLlib that none of ours is -> what comes nearest
INSTEAD = {
    "crr": "marwil with weight: binary has its filter, over returns, and iql its critic",
}

# what makes an algorithm of RLlib of one of ours; keys of the file go before it
PARTS: dict[str, dict[str, Any]] = {
    "ddpg": {"algo.num_critics": 1, "algo.policy_every": 1, "algo.target_noise": 0.0},
    "r2d2": {
        "algo.double": True, "algo.dueling": True, "algo.value_rescaling": True, "replay.prioritized": True,
    },
    "cql": {"algo.conservative": True},
    "dt": {"network.core.name": "gtrxl", "network.use_prev_action": True, "network.use_prev_reward": True},
}  # fmt: skip

KEYS: dict[str, Key] = {name: key for group in GROUPS.values() for key in group for name in key.names}


def markdown() -> str:
    """Returns the table of docs/rllib-users.md."""
    lines = []
    for title, keys in GROUPS.items():
        lines += [f"### {title}", "", "| RLlib | jrl | |", "| --- | --- | --- |"]
        rows: dict[tuple[str, str], list[str]] = {}
        for key in keys:  # keys without a counterpart share a row with those of the same reason
            where = (key.ours, key.note) if not key.ours else (key.ours, f"{key.note}\0{key.name}")
            rows.setdefault(where, []).extend(key.names)
        for (ours, note), names in rows.items():
            theirs, mine = (" ".join(f"`{n}`" for n in several) for several in (names, ours.split(", ")))
            lines.append(f"| {theirs} | {mine if ours else 'none'} | {note.partition(chr(0))[0]} |")
        lines.append("")
    return "\n".join(lines)
