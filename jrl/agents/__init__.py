"""Policies of several agents: fixed, chosen by game, in self-play."""
