"""Answers that must have a given form."""
