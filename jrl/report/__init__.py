"""`python -m jrl.report`: comparison of runs with bootstrap intervals, as tables and learning curves."""
