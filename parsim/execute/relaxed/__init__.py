"""Real training whose replicas or stages are synchronised by a relaxed rule."""
