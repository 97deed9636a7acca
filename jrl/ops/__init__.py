"""Pure maths on arrays; imports jax only."""
