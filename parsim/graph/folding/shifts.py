"""Replicas that gossip: one stands for those that are some multiple of replicas further on.

Move all replicas of a plan on by m. If every round then has the same links, and the machine is the same up to the names of
nodes and switches, the program is the same too. So replicas that are m apart have equal timelines, and m of them are simulated.
On a machine of equal nodes m is at least the ranks of a node. Rings, lattices (Ada's too) and exponential graphs allow that.

Leaf switches of a fat tree seldom allow it: 168 nodes fill nine leaves of 18 and a third of a tenth, and a message that crosses
leaves takes a microsecond longer. Without them such replicas are nearly alike (`parsim.predict.nearly_alike`).

Leaves out: replicas of several ranks, and symmetries other than moving on, such as the mirror image of a mesh.
"""

from __future__ import annotations

import numpy as np

from parsim.arrays import Floats
from parsim.hardware.cluster import Cluster
from parsim.plans.plan import Plan


def repeats_after(plan: Plan, cluster: Cluster, replica_of: tuple[int, ...], *, leaves: bool = True) -> int:
    """The smallest m for which moving all replicas on by m changes nothing; the number of copies if there is none.

    Args:
        plan: with synchronisation gossip. cluster: the machine.
        replica_of: per replica the first that costs the same by itself (`parsim.graph.fold`).
        leaves: False takes all leaf switches for one.
    """
    replicas, rule = plan.mesh.dp, plan.synchronisation
    if plan.world_size > replicas:
        return plan.mesh.copies
    kinds = np.array(replica_of)
    for step in range(1, replicas // 2 + 1):
        if replicas % step or not (kinds == np.roll(kinds, -step)).all() or not _same_machine(cluster, replicas, step, leaves):
            continue
        if all(_same_links(rule.matrix(number, replicas), step) for number in rule.cycle(replicas)):
            return step
    return replicas


def _same_links(matrix: Floats, step: int) -> bool:
    """Whether replicas that are moved on by `step` take weights of the same others, moved on as far."""
    links = matrix != 0
    return bool((links == np.roll(links, (step, step), axis=(0, 1))).all())


def _same_machine(cluster: Cluster, ranks: int, step: int, leaves: bool) -> bool:
    """Whether a rank moved on sits at the same place of a node, and nodes and leaves become nodes and leaves alike.

    A machine without a link model prices a message by its size alone.
    """
    if cluster.profile.communication.link_model is None:
        return True
    places, nodes = cluster.places, cluster.nodes
    node_of: dict[int, int] = {}
    leaf_of: dict[str, str] = {}
    for rank in range(ranks):
        (node, number), (other, moved) = places[rank], places[(rank + step) % ranks]
        if number != moved or nodes.shapes[node] is not nodes.shapes[other] or node_of.setdefault(node, other) != other:
            return False
        leaf, next_leaf = nodes.leaf[node], nodes.leaf[other]
        if not leaves:
            continue
        if nodes.leaves.get(leaf) != nodes.leaves.get(next_leaf) or leaf_of.setdefault(leaf, next_leaf) != next_leaf:
            return False
    return len(set(node_of.values())) == len(node_of) and len(set(leaf_of.values())) == len(leaf_of)
