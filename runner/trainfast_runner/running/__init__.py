"""Plan, launch, supervise, follow and stop runs; list and delete old ones."""
