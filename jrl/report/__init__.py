"""`python -m jrl.report`: runs read, compared with honest statistics, told as tables and learning curves."""
