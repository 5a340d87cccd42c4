"""Seconds, with their uncertainty and source, for any piece of work on any device or group of devices of a cluster."""

from parsim.costs.costs import Costs, price
from parsim.costs.estimate import Estimate, OverlapFactors, Term

__all__ = ["Costs", "Estimate", "OverlapFactors", "Term", "price"]
