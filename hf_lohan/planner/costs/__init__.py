"""What a step takes: of one rank, of several, and of experts that stream one by one."""
