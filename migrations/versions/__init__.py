"""The steps, each named after its number and what it does."""
