"""Exact value and exploitability of the policies of a run in Kuhn poker (`configs/kuhn_poker.yaml`).

    python scripts/kuhn_poker.py runs/kuhn

Prints a line per checkpoint of the run, and the strategy of the latest.

Each player antes 1 and gets one of the cards J, Q, K; a bet is 1. The value is the mean payoff of the player that
begins, at equilibrium -1/18 (Kuhn 1950). The exploitability is the mean over both seats of what a best response wins
more than the value; it is 0 at equilibrium only. Probabilities of actions are frequencies of 20,000 samples each.
"""

import argparse
import itertools
import sys
from pathlib import Path

import numpy as np

import jrl
from jrl.play.actor import Actor
from jrl.run.store import checkpoint

SAMPLES = 20_000
BET, PASS, WAIT = 0, 1, 2  # actions of pgx; the last is jrl's
CARDS = range(3)
Strategy = dict[tuple[int, str], float]  # (card, what happened: "", "p", "b", "pb") -> probability of a bet or a call


def observe(card: int, mine: int, other: int, *, acts: bool) -> dict[str, np.ndarray]:
    """Returns an observation of pgx's kuhn_poker: [7] card and bets one-hot, and the mask of actions [3]."""
    obs = np.zeros(7, np.float32)
    obs[[card, 3 + mine, 5 + other]] = 1
    return {"obs": obs, "action_mask": np.array([1, 1, 0] if acts else [0, 0, 1], np.int8)}


def ask(policy: Actor, rows: list[dict[str, np.ndarray]]) -> float:
    """Returns the probability of a bet after the observations of one episode."""
    policy.reset()
    for row in rows:
        batch = {name: np.broadcast_to(x, (SAMPLES, *x.shape)) for name, x in row.items()}
        action = policy.act(batch, explore=True)
    return float(np.mean(action == BET))


def read_strategy(policy: Actor) -> Strategy:
    """Asks the policy in each information set."""
    found = {}
    for card in CARDS:
        begins = observe(card, 0, 0, acts=True)
        waits = observe(card, 0, 0, acts=False)
        facing = observe(card, 0, 1, acts=True)
        found[card, ""] = ask(policy, [begins])
        found[card, "p"] = ask(policy, [waits, begins])
        found[card, "b"] = ask(policy, [waits, facing])
        found[card, "pb"] = ask(policy, [begins, waits, facing])
    return found


def payoff(deal: tuple[int, int], first: Strategy, second: Strategy) -> float:
    """Returns the mean payoff of the player that begins, with the cards (own, the other's)."""
    mine, other = deal
    sign = 1.0 if mine > other else -1.0
    called = lambda call: 2 * sign * call
    bets = second[other, "b"]
    after_bet = called(bets) + (1 - bets)
    calls = first[mine, "pb"]
    after_raise = called(calls) - (1 - calls)
    raises = second[other, "p"]
    after_pass = raises * after_raise + (1 - raises) * sign
    return first[mine, ""] * after_bet + (1 - first[mine, ""]) * after_pass


def value(first: Strategy, second: Strategy) -> float:
    """Returns the mean payoff of the player that begins, over all deals."""
    return float(np.mean([payoff(deal, first, second) for deal in itertools.permutations(CARDS, 2)]))


def best_value(strategy: Strategy, seat: int) -> float:
    """Returns the payoff of a best response in a seat, 0 or 1, by trying all pure strategies."""
    names = [(card, past) for card in CARDS for past in (("", "pb") if seat == 0 else ("p", "b"))]
    best = -np.inf
    for choice in itertools.product((0.0, 1.0), repeat=len(names)):
        pure = dict(zip(names, choice, strict=True))
        best = max(best, value(pure, strategy) if seat == 0 else -value(strategy, pure))
    return best


def main(argv: list[str] | None = None) -> int:
    form = argparse.RawDescriptionHelpFormatter
    p = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    p.add_argument("run", type=Path, help="run directory or checkpoint")
    args = p.parse_args(argv)
    folder = args.run / "checkpoints"
    checkpoints = [folder / str(n) for n in checkpoint.saved_steps(folder)] if folder.is_dir() else [args.run]
    for path in checkpoints:
        strategy = read_strategy(jrl.load(path))
        exploitability = (best_value(strategy, 0) + best_value(strategy, 1)) / 2
        steps, mean = checkpoint.read_meta(path)["env_steps"], value(strategy, strategy)
        print(f"{steps:>10,} steps  value {mean:.4f} (equilibrium {-1 / 18:.4f})  exploitability {exploitability:.4f}")
    for (card, past), bet in strategy.items():
        print(f"{'JQK'[card]} {past or '-':<3} bets {bet:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
