"""Checkpoints for training runs that survive."""
