"""Sampling engines behind one protocol, and the workers that host them."""
