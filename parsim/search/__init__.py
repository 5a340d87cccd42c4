"""Which plan: enumerate, estimate, simulate the best, refine.

In all of this room `problem` is the question (model, cluster, batch, constraints), `mesh` that of the plans, `count` their
microbatches per replica, `samples` those of one replica's microbatch, and an order of a pipeline comes with its
stages per rank.
"""
