"""What many workers would cost: decisions by simulation, the rest by a measured model."""
