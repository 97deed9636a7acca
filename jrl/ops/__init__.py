"""Pure maths on arrays. Imports jax only."""
