"""`python -m jrl.reproduce`: published results trained again, and compared."""
