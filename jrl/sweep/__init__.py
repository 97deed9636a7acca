"""Populations: runs that differ in seed and hyper-parameters, trained at once; each has its own run directory."""
