"""Seconds, with their uncertainty and source, for any piece of work on any device or group of devices of a cluster."""

from parsim.costs.costs import Costs
from parsim.costs.estimate import Estimate, OverlapFactors, Term
from parsim.costs.pricing import price

__all__ = ["Costs", "Estimate", "OverlapFactors", "Term", "price"]
