"""Weights: what a model's files are (`manifest`, `index`), and the step that brings them (`step`)."""
