"""What a step costs under elastane and its peers, over a plain step of the same model."""
