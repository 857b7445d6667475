"""Routers compared on simulated replicas, in virtual time. `python -m experiments.routing --help`."""
