"""Plans of relaxed synchronisation: they are few, so all of them are simulated."""
