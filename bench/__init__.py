"""Measurements of cachefs, and the lab they are made in."""
