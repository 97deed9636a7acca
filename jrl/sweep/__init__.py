"""Populations: runs that differ in their seed and hyper-parameters, side by side; each is an ordinary run directory."""
