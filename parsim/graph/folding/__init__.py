"""What folding asks of ranks and of the communication inside replicas."""
