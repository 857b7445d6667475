"""Routers compared on simulated replicas, in virtual time. `python -m studies.routing.run --help`."""
